"""What one pass does to the recurrent states of its sequences: which records are folded, which rows run, what is kept.

All layers share it. The order is that of the entries: a fold of a record gives the same bits as the row that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from engine.recurrent.slots import NUM_RECORDS


class StateStep(NamedTuple):
    """One entry further, of all sequences that go that far. Index tensors are int64."""

    #: The sequences; None: all.
    sequences: torch.Tensor | None
    #: Of each the place of its record, or its row.
    source: torch.Tensor
    #: Among the sequences those whose state is stored now, and their slots; None: of none.
    stored: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class StatePlan:
    """Of every sequence of a batch: its slot, and the entries between which its layers go on."""

    slots: Sequence[int]
    #: Entries in the stored state; records of those from here to ``starts`` are folded first.
    bases: Sequence[int]
    #: Entries before the rows of this pass.
    starts: Sequence[int]
    #: Entries after them.
    ends: Sequence[int]
    #: Entries in the state that is stored by this pass; it has records of those from here on.
    new_bases: Sequence[int]
    device: torch.device
    _windows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def row_starts(self) -> list[int]:
        """First row of each sequence, then T."""
        rows = [0]
        for start, end in zip(self.starts, self.ends, strict=True):
            rows.append(rows[-1] + end - start)
        return rows

    @cached_property
    def numbers(self) -> torch.Tensor:
        """int64 [6, S]: slots, bases, starts, ends, new bases, first rows."""
        parts = (self.slots, self.bases, self.starts, self.ends, self.new_bases, self.row_starts[:-1])
        return torch.tensor(parts, dtype=torch.int64)

    @cached_property
    def slot_ids(self) -> torch.Tensor:
        """int64 [S]."""
        return self._ids(self.slots)

    @cached_property
    def fresh(self) -> torch.Tensor | None:
        """int64: sequences whose stored state counts as zero; None: there are none."""
        fresh = [i for i, base in enumerate(self.bases) if base == 0]
        return self._ids(fresh) if fresh else None

    @cached_property
    def folds(self) -> list[StateStep]:
        """Steps over records; the source is slot * NUM_RECORDS + place."""
        counts = [start - base for start, base in zip(self.starts, self.bases, strict=True)]
        places = [
            [slot * NUM_RECORDS + entry % NUM_RECORDS for entry in range(base, start)]
            for slot, base, start in zip(self.slots, self.bases, self.starts, strict=True)
        ]
        return self._steps(counts, places, self.bases)

    @cached_property
    def runs(self) -> list[StateStep]:
        """Steps over the rows of the pass."""
        counts = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        rows = [range(first, first + count) for first, count in zip(self.row_starts[:-1], counts, strict=True)]
        return self._steps(counts, rows, self.starts)

    @cached_property
    def recorded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the records that are kept of this pass, as in :attr:`folds`, and their rows; int64."""
        return self._last_rows(self.new_bases, NUM_RECORDS)

    def last_inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places slot * size + entry % size of the last ``size`` rows of each sequence, and these rows; int64."""
        return self._last_rows(
            [max(start, end - size) for start, end in zip(self.starts, self.ends, strict=True)], size
        )

    def windows(self, taps: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs that each row of a convolution of ``taps`` reads, itself included.

        Returns places of the older inputs in rings of ``size``, int64 [P], and int64 [T, taps]: 0 is a zero input, from
        1 on come the older inputs, then the rows.
        """
        if (taps, size) not in self._windows:
            self._windows[taps, size] = self._make_windows(taps, size)
        return self._windows[taps, size]

    def _make_windows(self, taps: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        older: list[int] = []
        reads: list[int] = []
        first_row = 1 + sum(min(start, taps - 1) for start in self.starts)
        for slot, start, end, row in zip(self.slots, self.starts, self.ends, self.row_starts[:-1], strict=True):
            count, first = min(start, taps - 1), 1 + len(older)
            older += [slot * size + entry % size for entry in range(start - count, start)]
            for entry in range(start, end):
                for read in range(entry - taps + 1, entry + 1):
                    at = first_row + row + read - start if read >= start else first + read - start + count
                    reads.append(at if read >= 0 else 0)
        return self._ids(older), self._ids(reads).view(-1, taps)

    def _last_rows(self, firsts: Sequence[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        places, rows = [], []
        for slot, first, start, end, row in zip(
            self.slots, firsts, self.starts, self.ends, self.row_starts[:-1], strict=True
        ):
            for entry in range(max(first, start), end):
                places.append(slot * size + entry % size)
                rows.append(row + entry - start)
        return self._ids(places), self._ids(rows)

    def _steps(self, counts: Sequence[int], sources: Sequence[Sequence[int]], firsts: Sequence[int]) -> list[StateStep]:
        steps = []
        for number in range(max(counts)):
            going = [i for i, count in enumerate(counts) if count > number]
            stored = [at for at, i in enumerate(going) if firsts[i] + number + 1 == self.new_bases[i]]
            steps.append(
                StateStep(
                    None if len(going) == len(counts) else self._ids(going),
                    self._ids([sources[i][number] for i in going]),
                    (self._ids(stored), self._ids([self.slots[going[at]] for at in stored])) if stored else None,
                )
            )
        return steps

    def _ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device, non_blocking=True)
