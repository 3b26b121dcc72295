"""States of one recurrent layer, with records of the last entries: the reference of a pass over them, in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from engine.recurrent.plan import StatePlan
from engine.recurrent.slots import NUM_RECORDS

#: What an entry does to a state, part by part, float32 [n, …] each.
Records: TypeAlias = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of one sequence, and one record. All numbers are float32."""

    state: tuple[int, ...]
    records: Mapping[str, tuple[int, ...]]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes a sequence takes."""
        return 4 * (prod(self.state) + NUM_RECORDS * sum(prod(part) for part in self.records.values()))

    def allocate(self, num_slots: int, device: torch.device) -> StateCache:
        """States of so many sequences. On a CPU the system backs memory as it is first written."""
        places = num_slots + 1

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        records = {name: empty(places, NUM_RECORDS, *part) for name, part in self.records.items()}
        return StateCache(empty(places, *self.state), records)


@dataclass(frozen=True, slots=True)
class StateCache:
    """float32 tensors [slots + 1, …]; the record of entry e is at e % NUM_RECORDS."""

    state: torch.Tensor
    #: [slots + 1, NUM_RECORDS, …].
    records: Records


class Recurrence(ABC):
    """The rows of one pass through one layer."""

    @property
    @abstractmethod
    def records(self) -> Records:
        """What the rows do to a state, [T, …]; complete once all have run."""

    @abstractmethod
    def fold(self, state: torch.Tensor, records: Records) -> torch.Tensor:
        """States [n, …] after one more entry each: the operations of :meth:`run` on the state, in its order."""

    @abstractmethod
    def run(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """States [n, …] after one more row each, int64 [n]. Keeps the rows' outputs."""


def run_pass(cache: StateCache, plan: StatePlan, recurrence: Recurrence) -> None:
    """Fold what was kept, run the rows, store the state once, and record the rows that may be rolled back."""
    state = cache.state[plan.slot_ids]
    if plan.fresh is not None:
        state[plan.fresh] = 0.0
    past = {name: part.flatten(0, 1) for name, part in cache.records.items()}
    for is_run, steps in ((False, plan.folds), (True, plan.runs)):
        for step in steps:
            before = state if step.sequences is None else state[step.sequences]
            if is_run:
                after = recurrence.run(before, step.source)
            else:
                after = recurrence.fold(before, {name: part[step.source] for name, part in past.items()})
            if step.sequences is None:
                state = after
            else:
                state[step.sequences] = after
            if step.stored is not None:
                cache.state[step.stored[1]] = after[step.stored[0]]
    places, rows = plan.recorded
    for name, part in recurrence.records.items():
        past[name][places] = part[rows]
