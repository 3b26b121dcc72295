"""Which blocks hold the entries of which tokens: a tree of the texts that a cache holds, block by block."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import islice, takewhile
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

#: Who may share entries with each other, and what else decides what they hold: texts of two scopes have no block in
#: common.
Scope: TypeAlias = tuple[Hashable, ...]

#: Blocks after one prefix that are compared with a text to find the longest beginning in common.
MAX_COMPARED: Final = 16


class PrefixNode:
    """A block, and with those above it the text that its entries stand for. The root of a scope has none."""

    __slots__ = ("__weakref__", "block", "children", "depth", "parent", "token_ids")

    def __init__(self, parent: PrefixNode | None, token_ids: bytes, block: int) -> None:
        self.parent = parent
        #: int32 of the block's tokens; of a partly filled block fewer than it has room for, and nothing follows them.
        self.token_ids = token_ids
        self.block = block
        self.children: dict[bytes, PrefixNode] = {}
        #: Blocks up to this one.
        self.depth: int = 0 if parent is None else parent.depth + 1


class PrefixTree:
    """The nodes of all scopes, by text and by block. The tokens themselves are compared, so no two texts are mixed up.

    A node stays as long as its block holds what it says, a root as long as anything refers to it.
    """

    def __init__(self) -> None:
        self._roots: WeakValueDictionary[Scope, PrefixNode] = WeakValueDictionary()
        self._nodes: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        """Blocks that have a node."""
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        """Whether the block has a node."""
        return block in self._nodes

    def root(self, scope: Scope) -> PrefixNode:
        """The empty text of a scope."""
        return self._roots.setdefault(scope, PrefixNode(None, b"", 0))

    def add(self, parent: PrefixNode, token_ids: bytes, block: int) -> PrefixNode:
        """The block holds the entries of these tokens, after those of ``parent``."""
        node = parent.children[token_ids] = self._nodes[block] = PrefixNode(parent, token_ids, block)
        return node

    def remove(self, block: int) -> list[PrefixNode]:
        """The block will hold something else. Returns its node, and those that follow it: they are not found any more,
        either.
        """
        node = self._nodes[block]
        assert node.parent is not None
        del node.parent.children[node.token_ids]
        removed = [node]
        for each in removed:  # grows meanwhile
            del self._nodes[each.block]
            removed += each.children.values()
        return removed


def longest_beginning(parent: PrefixNode, token_ids: bytes) -> tuple[PrefixNode | None, int]:
    """Of the newest blocks after ``parent`` the one that begins most like a text, and the tokens in common."""
    best, most = None, 0
    for child in islice(reversed(parent.children.values()), MAX_COMPARED):
        count = num_common(child.token_ids, token_ids)
        if count > most:
            best, most = child, count
    return best, most


def num_common(left: bytes, right: bytes) -> int:
    """Tokens that two texts begin with."""
    pairs = zip(memoryview(left).cast("i"), memoryview(right).cast("i"), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def pack(token_ids: Sequence[int]) -> bytes:
    """Tokens as a node has them."""
    return array("i", token_ids).tobytes()
