"""The sequences of the KV cache: which blocks belong to each, and which they share. Uses no device.

Called from the event loop only. A sequence gets blocks before a pass that needs them, so a pass never allocates.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from engine.dropped_entries import DroppedEntries
from engine.kept_states import KeptStates
from engine.kv_blocks import KVBlocks
from engine.kv_sequence import BlockIds, KVSequence
from engine.prefix_tree import PrefixNode, Scope, longest_beginning, pack
from engine.recurrent.slots import StateSlots
from specdec.errors import InvalidRequest, Overloaded

_NO_BLOCKS: Final = np.empty(0, dtype=np.int32)


class CacheFull(Overloaded):
    """The KV cache has too few free blocks at this moment; the text carries the numbers."""


class KVPool:
    """A fixed number of blocks of ``block_size`` tokens, handed out to sequences.

    Block 0 pads block tables and takes the rows of a sequence released under a queued batch.
    """

    def __init__(
        self, total_blocks: int, block_size: int, *, has_windows: bool = False, states: StateSlots | None = None
    ) -> None:
        """``has_windows``: attention sees a window of the entries, and finds its first by the position of a row.
        ``states``: places for the recurrent states of sequences, where the model has such.
        """
        self._has_windows = has_windows
        #: None: the model has no recurrent states.
        self.states = states
        self._states = None if states is None else KeptStates(states)
        self.total_blocks = total_blocks
        self.block_size = block_size
        #: Entries at the beginning of a block that are worth a copy of it: it takes 21 µs with a target of 12 M
        #: parameters on two cores, where a token of a prompt takes 40.
        self._least_copied = 1 if states is not None else max(1, block_size // 4)
        self._blocks = KVBlocks(total_blocks, None if self._states is None else self._states.forget)
        self._num_open = 0
        self._copies: deque[tuple[int, int]] = deque()

    # --- sequences ---

    def open(self, max_tokens: int) -> KVSequence:
        """A sequence with blocks for ``max_tokens`` entries, which shares none with others.

        Raises:
            InvalidRequest: it can never fit.
            CacheFull: it does not fit now.
        """
        self.check_fits(max_tokens)
        sequence = self.open_empty()
        if not self.grow(sequence, max_tokens):
            self.release(sequence)
            raise CacheFull(
                f"{max_tokens} tokens need {self.blocks_for(max_tokens)} KV blocks and {self.used_blocks} of"
                f" {self.total_blocks} are in use by {self._num_open} open sessions: retry when some have ended"
            )
        return sequence

    def open_empty(self, scope: Scope | None = None) -> KVSequence:
        """A sequence without blocks. It shares entries with the other sequences of its scope; None: with none.

        Raises:
            CacheFull: there is no place for its recurrent states.
        """
        kept = self._states
        if kept is not None and not kept.num_available:
            raise CacheFull(
                f"the {kept.count} places for recurrent states are in use by {self._num_open} open sessions: retry"
                " when some have ended, or raise kv_cache_memory_bytes"
            )
        states = None if kept is None else kept.take()
        self._num_open += 1
        sequence = KVSequence(_NO_BLOCKS, 0, states=states)
        self._place(sequence, None if scope is None else self._blocks.tree.root(scope))
        return sequence

    def can_open(self, max_tokens: int, count: int = 1) -> bool:
        """Whether :meth:`open` would succeed so many times now."""
        has_places = self._states is None or count <= self._states.num_available
        return has_places and count * self.blocks_for(max_tokens) <= self.available_blocks

    def check_fits(self, max_tokens: int) -> None:
        """Raise :class:`InvalidRequest` where a sequence of ``max_tokens`` entries can never fit."""
        if (num_blocks := self.blocks_for(max_tokens)) > self.total_blocks:
            raise InvalidRequest(
                f"a sequence of {max_tokens} tokens needs {num_blocks} KV blocks of {self.block_size} tokens and the"
                f" cache has {self.total_blocks}: shorten it or raise kv_cache_memory_bytes",
                param="max_tokens",
            )

    def grow(self, sequence: KVSequence, num_entries: int) -> bool:
        """Give the sequence blocks for ``num_entries`` entries in all; False where they do not suffice."""
        missing = -(-num_entries // self.block_size) - len(sequence.blocks)
        if missing > 0:
            self._check_open(sequence)
            if missing > self.available_blocks:
                return False
            self._set_blocks(sequence, np.concatenate((sequence.blocks, self._blocks.take(missing))))
        return True

    def rollback(self, sequence: KVSequence, length: int) -> None:
        """Drop the entries after the first ``length``. O(1), except into blocks that others may read.

        Those are given up, and the one that is kept in part is copied, so the others never read what is written next.
        Without a block for the copy, the sequence keeps the entries of whole blocks only; and none where the recurrent
        states cannot be had at that length.
        """
        self._check_open(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot roll back to {length} of {sequence.length} entries")
        first, partial = divmod(length, self.block_size)
        if first < sequence.num_shared_blocks:
            length = self._leave(sequence, first, partial)
        if sequence.states is not None and not sequence.states.reaches(length):
            length = self._leave(sequence, 0, 0) if sequence.num_shared_blocks else 0
        sequence.length = length
        if sequence.dropped.gaps:
            sequence.dropped = sequence.dropped.before(length)

    def drop_blocks(self, sequence: KVSequence, first: int, count: int) -> None:
        """Drop ``count`` whole blocks with their entries from block ``first`` on. Entries behind them become that much
        earlier ones, and rows to come keep their positions. Others do not find its text from there on.
        """
        self._check_open(sequence)
        if self._has_windows:
            raise ValueError("the model's attention has a sliding window, which counts entries: none can be dropped")
        if self._states is not None:
            raise ValueError("the model has recurrent states, which hold every entry: none can be dropped")
        end, size, blocks = first + count, self.block_size, sequence.blocks
        if not 0 <= first <= end or end * size > sequence.length:
            raise ValueError(
                f"cannot drop blocks {first} to {end} of {size} entries: there are {sequence.length} entries"
            )
        self._set_blocks(sequence, np.concatenate((blocks[:first], blocks[end:])))
        sequence.length -= count * size
        sequence.dropped = sequence.dropped.and_from(first * size, count * size)
        if sequence.num_shared_blocks > first:
            sequence.num_shared_blocks = max(first, sequence.num_shared_blocks - count)
        self._place(sequence, None)
        self._blocks.drop(blocks[first:end])

    def vacate(self, sequence: KVSequence) -> None:
        """Take all its blocks from an open sequence. What others find by its text they find as long as it is cached."""
        self._check_open(sequence)
        sequence.length = self._leave(sequence, 0, 0)
        sequence.dropped = DroppedEntries()
        if sequence.states is not None:
            sequence.states.forget()

    def release(self, sequence: KVSequence, token_ids: Sequence[int] = ()) -> None:
        """Give the blocks back. Idempotent. ``token_ids``: see :meth:`publish`; the last block is found, too, then."""
        if sequence.released:
            return
        self.publish(sequence, token_ids)
        node, length = sequence.node, min(sequence.length, len(token_ids))
        if node is not None and length - (start := node.depth * self.block_size) >= self._least_copied:
            text = pack(token_ids[start:length])
            if text not in node.children:
                self._blocks.tree.add(node, text, int(sequence.blocks[node.depth]))
            node = node.children[text]
        if self._states is not None and sequence.states is not None:
            self._states.give_back(sequence.states, node if length == sequence.length else None)
        sequence.released = True
        self._place(sequence, None)
        self._num_open -= 1
        self._blocks.drop(sequence.blocks)

    # --- entries in common ---

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        """Let others find the sequence's full blocks by their text: entry i stands for ``token_ids[i]``, for good.

        Where another sequence has computed the same block, this one gives its own up.
        """
        node, size = sequence.node, self.block_size
        if node is None:
            return
        end = min(sequence.length, len(token_ids)) // size
        for index in range(node.depth, end):
            text = pack(token_ids[index * size : (index + 1) * size])
            block = int(sequence.blocks[index])
            found = node.children.get(text)
            if found is None:
                found = self._blocks.tree.add(node, text, block)
            elif found.block != block:
                self._take_over(sequence, [found])
            node = found
        self._place(sequence, node)
        sequence.num_shared_blocks = max(sequence.num_shared_blocks, end)

    def keep_states(self, sequence: KVSequence, interval: int = 0) -> None:
        """Keep a copy of the recurrent states of the text that others find, so that they can go on with it. Nothing is
        kept where those of the last ``interval`` entries are. The sequence is in no pass.
        """
        node = sequence.node
        if self._states is not None and node is not None and sequence.states is not None:
            num_blocks = interval // self.block_size
            self._states.snapshot(sequence.states, node, node.depth * self.block_size, num_blocks)

    def match(self, sequence: KVSequence, token_ids: Sequence[int], end: int) -> int:
        """Take over the entries of others for the first ``end`` tokens, as far as they go beyond its own.

        Returns how many more entries the sequence has. Full blocks are shared. A block that agrees in part, by a
        quarter at least, is copied before the next pass, if there is a block to copy it to. Does nothing where some of
        the sequence's own entries are not published yet.
        """
        node, size, start = sequence.node, self.block_size, sequence.length
        if node is None or start != node.depth * size:
            return 0
        if sequence.states is not None:
            return self._match_states(sequence, token_ids, end)
        found = self._find(node, token_ids, end)
        self._take_over(sequence, found)
        sequence.length += len(found) * size
        rest = token_ids[sequence.length : min(end, sequence.length + size)]
        sequence.length += self._copy_beginning(sequence, found[-1] if found else node, rest)
        return sequence.length - start

    def blocks_to_match(self, sequence: KVSequence, token_ids: Sequence[int], end: int) -> tuple[int, int]:
        """The full blocks that :meth:`match` would find, and how many of them nobody uses."""
        if sequence.node is None:
            return 0, 0
        found = self._find(sequence.node, token_ids, end)
        if self._states is not None and sequence.states is not None:
            _, length = self._states.find(sequence.node, found, token_ids, end, self.block_size)
            found = found[: max(0, length // self.block_size - sequence.node.depth)]
        return len(found), self._blocks.count_cached(found)

    def next_block(self, sequence: KVSequence, token_ids: Sequence[int]) -> tuple[PrefixNode, bytes] | None:
        """What tells the block that the sequence computes next from all others; None: nobody else could use it."""
        node, size = sequence.node, self.block_size
        if node is None or (node.depth + 1) * size > len(token_ids):
            return None
        return node, pack(token_ids[node.depth * size : (node.depth + 1) * size])

    # --- for the engine, and for those who look on ---

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks (from, to) to copy before anything is written. Called by the engine, on the device thread."""
        return [self._copies.popleft() for _ in range(len(self._copies))]

    def take_state_copies(self) -> list[tuple[int, int]]:
        """Places (from, to) of recurrent states to copy one after the other, as :meth:`take_copies`."""
        return [] if self._states is None else self._states.take_copies()

    @property
    def used_blocks(self) -> int:
        """Blocks of open sequences."""
        return self.total_blocks - self.available_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks of no sequence whose entries can be found by their text."""
        return self._blocks.num_cached

    @property
    def available_blocks(self) -> int:
        """Blocks that sequences can get: free and cached ones."""
        return self._blocks.num_available

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return self._num_open

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` entries; ValueError below 1."""
        if num_tokens < 1:
            raise ValueError(f"a sequence needs room for at least 1 token, not {num_tokens}")
        return -(-num_tokens // self.block_size)

    # --- inside ---

    @staticmethod
    def _check_open(sequence: KVSequence) -> None:
        if sequence.released:
            raise ValueError("the sequence was released")

    def _place(self, sequence: KVSequence, node: PrefixNode | None) -> None:
        """The sequence's blocks are found by their text up to a node."""
        sequence.node = node
        sequence.publishable_from = sys.maxsize if node is None else (node.depth + 1) * self.block_size

    def _set_blocks(self, sequence: KVSequence, blocks: BlockIds) -> None:
        sequence.blocks = blocks
        sequence.capacity = len(blocks) * self.block_size

    def _find(self, node: PrefixNode, token_ids: Sequence[int], end: int) -> list[PrefixNode]:
        """The full blocks after a node that hold the text up to token ``end``, as far as there are any."""
        found, size = [], self.block_size
        for start in range(node.depth * size, end - size + 1, size):
            following = node.children.get(pack(token_ids[start : start + size]))
            if following is None:
                break
            found.append(node := following)
        return found

    def _take_over(self, sequence: KVSequence, found: Sequence[PrefixNode]) -> None:
        """Share blocks that follow those of the sequence, which gives up its own in their places."""
        if not found:
            return
        shared = np.array([each.block for each in found], dtype=np.int32)
        last = found[-1].depth
        first = last - len(found)
        replaced = sequence.blocks[first:last]
        self._blocks.add(shared)
        self._set_blocks(sequence, np.concatenate((sequence.blocks[:first], shared, sequence.blocks[last:])))
        self._blocks.drop(replaced)
        self._place(sequence, found[-1])
        sequence.num_shared_blocks = max(sequence.num_shared_blocks, last)

    def _match_states(self, sequence: KVSequence, token_ids: Sequence[int], end: int) -> int:
        """Take over the states of the longest text that they are kept of, and its blocks."""
        assert self._states is not None
        assert sequence.states is not None
        assert sequence.node is not None
        start = sequence.length
        known = self._find(sequence.node, token_ids, end)
        sequence.fork = start + len(known) * self.block_size
        states, length = self._states.find(sequence.node, known, token_ids, end, self.block_size)
        if states is None or length <= start:
            return 0
        num_full, rest = divmod(length, self.block_size)
        shared = known[: num_full - sequence.node.depth]
        parted = [states.parted] if rest and states.parted is not None else []
        num_unused = self._blocks.count_cached((*shared, *parted))
        num_own = self.blocks_for(length) - max(num_full, len(sequence.blocks))
        if num_own > self.available_blocks - num_unused:
            return 0
        # First of all: what follows may take the blocks of the text that the states are kept with.
        self._states.copy_to(sequence.states, states.node, length)
        self._take_over(sequence, shared)
        for node in parted:
            is_copied = self._copy_from(node.block, sequence, length)
            assert is_copied, "the blocks were counted"
        sequence.length = length
        return length - start

    def _copy_beginning(self, sequence: KVSequence, node: PrefixNode, token_ids: Sequence[int]) -> int:
        """Copy what the best block after ``node`` has in common with a text; returns the entries copied."""
        found, count = longest_beginning(node, pack(token_ids))
        if found is None or count < self._least_copied:
            return 0
        return count if self._copy_from(found.block, sequence, sequence.length + count) else 0

    def _copy_from(self, block: int, sequence: KVSequence, num_entries: int) -> bool:
        """Have a block copied to that of the last one of a sequence's entries; False: there is no block for it."""
        held = np.array([block], dtype=np.int32)  # not to be reused for the copy
        self._blocks.add(held)
        has_room = self.grow(sequence, num_entries)
        self._blocks.drop(held)
        if has_room:
            self._copies.append((block, int(sequence.blocks[(num_entries - 1) // self.block_size])))
        return has_room

    def _leave(self, sequence: KVSequence, first: int, partial: int) -> int:
        """Give up the blocks that others may read from block ``first`` on, and those after them; returns the entries
        kept. Of the first block ``partial`` entries are kept, if there is another one for them.
        """
        blocks = sequence.blocks
        kept = blocks[:first]
        if partial and self.available_blocks:
            own = self._blocks.take(1)
            self._copies.append((int(blocks[first]), int(own[0])))
            kept = np.concatenate((kept, own))
        else:
            partial = 0
        self._set_blocks(sequence, kept)
        sequence.num_shared_blocks = first
        self._place(sequence, _ancestor(sequence.node, first))
        self._blocks.drop(blocks[first:])
        return first * self.block_size + partial


def _ancestor(node: PrefixNode | None, depth: int) -> PrefixNode | None:
    """The node itself, or the one above it at ``depth``."""
    while node is not None and node.depth > depth:
        node = node.parent
    return node
