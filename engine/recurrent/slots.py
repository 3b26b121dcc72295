"""Which sequences have recurrent states, where these lie, and which entries they stand for. Uses no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Entries of which a layer keeps records at most: any round can be rolled back to any of its rows.
NUM_RECORDS: Final = 65


@dataclass(slots=True, eq=False)
class StateSlot:
    """The states of one sequence, in every recurrent layer.

    A layer keeps the state after the first ``base`` entries, and a record of every entry from there to ``end``. So the
    state after any number of entries between the two can be had, to the bit: which one is wanted is the sequence's
    length alone.
    """

    #: Place in the caches; 0 is written to and means nothing.
    index: int
    #: As of :class:`StateSlots`.
    num_kept: int = 0
    base: int = 0
    end: int = 0

    def reaches(self, length: int) -> bool:
        """Whether the state after ``length`` entries can be had. That after none always can."""
        return length == 0 or self.base <= length <= self.end

    def bases(self, length: int, num_rows: int) -> tuple[int, int]:
        """The bases before and after ``num_rows`` rows that are fed after ``length`` entries."""
        end = length + num_rows
        base = self.base if length else 0
        return base, max(base, min(length, end - self.num_kept), end - NUM_RECORDS)

    def forget(self) -> None:
        """Nothing is known of the entries any more."""
        self.base = self.end = 0

    def moved(self) -> StateSlot:
        """The same states under another owner. Rows still fed to this one are lost."""
        other = StateSlot(self.index, self.num_kept, self.base, self.end)
        self.index = 0
        return other


class StateSlots:
    """Hands out the places 1 to ``count``, last-freed first."""

    def __init__(self, count: int, num_kept: int = 0) -> None:
        """``num_kept``: entries before the end of a sequence to which it must be possible to roll back at any time. The
        rows of the last pass can be rolled back anyway; a draft model needs those of a whole chain of passes.
        """
        self.count = count
        self.num_kept = num_kept
        self._free = list(range(count, 0, -1))

    @property
    def num_free(self) -> int:
        """Places that no sequence has."""
        return len(self._free)

    def take(self) -> StateSlot:
        """A place for a new sequence; there must be one."""
        return StateSlot(self._free.pop(), self.num_kept)

    def give_back(self, slot: StateSlot) -> None:
        """Free a place. Rows still fed to its sequence are lost."""
        if slot.index:
            self._free.append(slot.index)
            slot.index = 0
