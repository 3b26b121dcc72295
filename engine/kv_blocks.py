"""The blocks of the KV cache: how many sequences have each, and which are reused first. Uses no device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from engine.kv_sequence import BlockIds
from engine.prefix_tree import PrefixNode, PrefixTree


class KVBlocks:
    """Blocks 1 to ``total``. Block 0 is never handed out.

    A block is *used* while an open sequence has it. Else it is *cached* if its entries can be found by
    their text, or *free*. Free blocks are reused last-freed-first, so memory the system has not backed yet stays
    untouched; then cached ones, least recently used first. A sequence gives up its last block first, so of a text the
    end is reused before the beginning.
    """

    def __init__(self, total: int, forget: Callable[[PrefixNode], None] | None = None) -> None:
        """``forget`` is called with each node whose text is not found any more."""
        #: The texts of used and cached blocks.
        self.tree = PrefixTree()
        self._forget = forget
        self._free = np.arange(total, 0, -1, dtype=np.int32)  # a stack: the top is _free[_num_free - 1]
        self._num_free = total
        self._refs = np.zeros(total + 1, dtype=np.int32)  # sequences that have a block
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_cached(self) -> int:
        """Blocks of no sequence whose entries can be found by their text."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that sequences can get: free and cached ones."""
        return self._num_free + len(self._cached)

    def count_cached(self, nodes: Iterable[PrefixNode]) -> int:
        """How many of the nodes' blocks nobody uses."""
        return sum(node.block in self._cached for node in nodes)

    def take(self, count: int) -> BlockIds:
        """``count`` of the available blocks, now with one sequence each."""
        while self._num_free < count:
            block, _ = self._cached.popitem(last=False)
            removed = self.tree.remove(block)
            # Others follow it where a sequence has dropped it from the middle of its text; some may be in use.
            unused = [block, *(each.block for each in removed[1:] if each.block in self._cached)]
            for each in removed:
                self._cached.pop(each.block, None)
                if self._forget is not None:
                    self._forget(each)
            self._push(np.array(unused, dtype=np.int32))
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._refs[blocks] = 1
        return blocks

    def add(self, blocks: BlockIds) -> None:
        """One more sequence has these blocks, which are used or cached."""
        for block in blocks[self._refs[blocks] == 0].tolist():
            del self._cached[block]
        self._refs[blocks] += 1

    def drop(self, blocks: BlockIds) -> None:
        """One sequence less has these blocks. Those of none are cached, the last one as the least recently used, or
        free.
        """
        self._refs[blocks] -= 1
        unused = blocks[self._refs[blocks] == 0]
        if len(self.tree):
            found = np.array([block in self.tree for block in unused.tolist()], dtype=bool)
            self._cached.update(dict.fromkeys(unused[found][::-1].tolist()))
            unused = unused[~found]
        self._push(unused)

    def _push(self, blocks: BlockIds) -> None:
        """Put blocks on the stack of free ones, the first on top."""
        self._free[self._num_free : self._num_free + len(blocks)] = blocks[::-1]
        self._num_free += len(blocks)
