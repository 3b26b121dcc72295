"""Lookup drafters: they continue a text by what followed the same tokens elsewhere."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from draft_service.drafters.base import Draft, Drafter, DraftJob, DraftState
from specdec import __version__
from specdec.types import HiddenStates, ModelInfo


@dataclass(frozen=True, slots=True)
class Match:
    """A continuation that was found."""

    token_ids: tuple[int, ...] = ()
    #: How many of the last tokens stood in one place before, at most, and were continued there.
    length: int = 0


class LookupState(DraftState, Protocol):
    """What a lookup drafter keeps of one session."""

    def ingest(self, num_tokens: int) -> None:
        """Ingest the next ``num_tokens`` pending tokens."""
        ...

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; the new ones are pending."""
        ...


L = TypeVar("L", bound=LookupState)


class LookupDrafter(Drafter[L]):
    """A drafter that looks up: a few microseconds per token, on the event loop. It has no context limit."""

    def __init__(self, method: str, num_speculative_tokens: int) -> None:
        self.info = ModelInfo(
            name=method,
            architecture=method,
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            version=__version__,
        )

    @property
    @abstractmethod
    def long_match(self) -> int:
        """Tokens that must have matched for a continuation to be better than a model's."""

    @abstractmethod
    def look_up(self, state: L, num_tokens: int, assumed: Sequence[int] = ()) -> Match:
        """The best continuation, ``num_tokens`` at most, of the ingested tokens and those assumed after them.

        No token is pending. The state does not change.
        """

    def advance(
        self, state: L, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Replace what follows the first ``keep`` tokens."""
        state.replace(keep, token_ids)

    async def draft(self, batch: Sequence[DraftJob[L]]) -> list[Draft]:
        """Ingest and look up on the event loop; other tasks run between two batches."""
        drafts = [self.draft_one(job) for job in batch]
        await asyncio.sleep(0)
        return drafts

    def draft_one(self, job: DraftJob[L]) -> Draft:
        """Do one job. If it assumes the next token, that is the first one of what is found without it."""
        state = job.state
        state.ingest(state.num_pending if job.assumed else job.num_rows)
        if not job.num_tokens:
            return Draft()
        next_guesses = self.look_up(state, 1, job.assumed).token_ids if job.assumes_next else ()
        if job.assumes_next and not next_guesses:
            return Draft()
        match = self.look_up(state, job.num_tokens, (*job.assumed, *next_guesses))
        return Draft(match.token_ids, next_guesses=next_guesses)
