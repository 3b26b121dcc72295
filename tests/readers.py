"""A drafter that reads the target's hidden states, as heads do, and keeps every row for tests to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.base import Draft, Drafter, DraftJob
from specdec.types import HiddenStates, ModelInfo, SessionSpec


@dataclass(eq=False)
class Reading:
    """One session: the committed tokens, and the row of hidden states of each position it is known of."""

    token_ids: list[int]
    rows: dict[int, bytes] = field(default_factory=dict)
    #: Positions whose rows were ingested.
    taken: set[int] = field(default_factory=set)

    @property
    def num_pending(self) -> int:
        return len(self.rows) - len(self.taken)

    @property
    def is_ready(self) -> bool:
        """Whether the states behind the newest token are known."""
        return len(self.token_ids) - 2 in self.rows


class StateReader(Drafter[Reading]):
    """Drafts ``propose(reading)`` once the states of all committed tokens but the last are known, nothing before."""

    def __init__(
        self,
        propose: Callable[[Reading], Sequence[int]],
        layers: tuple[int, ...] = (-1,),
        *,
        last_only: bool = False,
        dtype: str = "",
        k: int = 4,
    ) -> None:
        self.info = ModelInfo(
            name="reader",
            method="reader",
            num_speculative_tokens=k,
            hidden_state_layers=layers,
            last_hidden_state_only=last_only,
            hidden_state_dtype=dtype,
        )
        self.propose = propose
        self.readings: list[Reading] = []
        #: Batches wait for it.
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_closed = 0

    def open(self, spec: SessionSpec) -> Reading:
        self.readings.append(Reading(list(spec.token_ids)))
        return self.readings[-1]

    def advance(
        self, state: Reading, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        assert 0 <= keep <= len(state.token_ids)
        state.token_ids[keep:] = token_ids
        state.rows = {position: row for position, row in state.rows.items() if position < keep}
        state.taken &= state.rows.keys()
        last = -1
        for block in hidden_states:
            assert self.info.hidden_state_dtype.startswith(block.dtype) or block.dtype == "bfloat16"
            assert block.start > last
            last = block.end - 1
            for i in range(block.num_positions):
                row = block.data[i * block.row_bytes : (i + 1) * block.row_bytes]
                state.rows.setdefault(block.start + i, row)
        assert last < len(state.token_ids)

    def room(self, state: Reading) -> int:
        return 2**31 if state.is_ready else 0

    async def draft(self, batch: Sequence[DraftJob[Reading]]) -> list[Draft]:
        await self.gate.wait()
        return [self._draft(job) for job in batch]

    def _draft(self, job: DraftJob[Reading]) -> Draft:
        state = job.state
        state.taken |= set(sorted(state.rows.keys() - state.taken)[: job.num_rows])
        return Draft(tuple(self.propose(state))[: job.num_tokens]) if job.num_tokens else Draft()

    def close(self, state: Reading, park_as: str | None = None) -> None:
        self.num_closed += 1
