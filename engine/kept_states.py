"""The recurrent states of texts that sequences have read, by the text. Uses no device.

Unlike the entries of a KV cache, a state cannot be cut anywhere, and is not shared: who goes on with it gets a copy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.prefix_tree import PrefixNode, num_common, pack
from engine.recurrent.slots import NUM_RECORDS, StateSlot, StateSlots


class FoundStates(NamedTuple):
    """States that a text can go on with."""

    #: The last block of the text that they are kept with.
    node: PrefixNode
    #: The block of it in which the text parts from it; None: it does not.
    parted: PrefixNode | None


class KeptStates:
    """Places for states: those of open sequences, and those kept, which are given up when there is no other place.

    Copies are made by the engine before the next pass, in the order in which they are asked for. Until then no pass
    writes to the place a copy is taken from, for its sequence is in none.
    """

    def __init__(self, slots: StateSlots) -> None:
        self._slots = slots
        #: By the last block of the text; the least recently used first.
        self._kept: OrderedDict[PrefixNode, StateSlot] = OrderedDict()
        self._copies: deque[tuple[int, int]] = deque()

    @property
    def count(self) -> int:
        """Places in all."""
        return self._slots.count

    @property
    def num_available(self) -> int:
        """Places that open sequences can get."""
        return self._slots.num_free + len(self._kept)

    def take(self) -> StateSlot:
        """A place for a new sequence; one must be available."""
        if not self._slots.num_free:
            self._slots.give_back(self._kept.popitem(last=False)[1])
        return self._slots.take()

    def give_back(self, slot: StateSlot, node: PrefixNode | None = None) -> None:
        """A sequence has ended. Keep its states, which stand for the text up to ``node``; None: they are of no use."""
        if node is None or node.parent is None or node in self._kept:
            self._slots.give_back(slot)
        else:
            self._kept[node] = slot.moved()

    def snapshot(self, slot: StateSlot, node: PrefixNode, length: int, num_blocks: int) -> None:
        """Keep a copy of an open sequence's states of its first ``length`` entries, the text up to ``node``; unless
        there are those of one of its last ``num_blocks`` blocks, or no place.
        """
        if not slot.reaches(length):
            return
        each: PrefixNode | None = node
        for _ in range(max(1, num_blocks)):
            if each is None or each.parent is None:
                break
            if each in self._kept:
                self._kept.move_to_end(each)
                return
            each = each.parent
        if node.parent is None or not self.num_available:
            return
        own = self.take()
        own.base, own.end = slot.base, length
        self._kept[node] = own
        self._copies.append((slot.index, own.index))

    def copy_to(self, slot: StateSlot, node: PrefixNode, length: int) -> None:
        """Give a sequence the states of the first ``length`` entries, kept with the text up to ``node``."""
        kept = self._kept[node]
        self._kept.move_to_end(node)
        slot.base, slot.end = kept.base, length
        self._copies.append((kept.index, slot.index))

    def take_copies(self) -> list[tuple[int, int]]:
        """Places (from, to) of states to copy, one after the other, before anything is written."""
        return [self._copies.popleft() for _ in range(len(self._copies))]

    def forget(self, node: PrefixNode) -> None:
        """The block of a node holds something else from now on."""
        if (slot := self._kept.pop(node, None)) is not None:
            self._slots.give_back(slot)

    def find(
        self, root: PrefixNode, found: Sequence[PrefixNode], token_ids: Sequence[int], end: int, block_size: int
    ) -> tuple[FoundStates | None, int]:
        """The longest text among the first ``end`` tokens whose states can be had, and its entries; 0: there is none.

        ``found``: the full blocks after ``root`` that hold the tokens. States may have been kept with a longer text
        that parts from this one, as far back as they have records.
        """
        best, most = None, 0
        known = {root, *found}
        for node, slot in self._kept.items():
            parted, each = None, node
            for _ in range(NUM_RECORDS // block_size + 2):
                if each in known or each.parent is None:
                    break
                parted, each = each, each.parent
            if each not in known:
                continue
            length = start = each.depth * block_size
            if parted is not None:
                rest = pack(token_ids[start : min(end, start + block_size)])
                length += num_common(parted.token_ids, rest)
            if length > most and slot.reaches(length):
                best, most = FoundStates(node, parted), length
        return best, most
