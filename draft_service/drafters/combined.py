"""Two drafters as one: a lookup where the text repeats itself, another drafter where it does not.

A lookup costs microseconds. Where text is copied it is right for many tokens, elsewhere hardly ever. So its draft is
used after a long match (``LookupDrafter.long_match``); no time is spent on the other drafter then. The other drafter
ingests the tokens it has missed in one pass, when it drafts next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Generic, TypeVar

from draft_service.drafters.base import Draft, Drafter, DraftJob, DraftState, Occupancy
from draft_service.drafters.lookup import LookupDrafter
from specdec.lookup.base import LookupText
from specdec.settings import SpeculativeSettings
from specdec.types import HiddenStates, ModelInfo, SessionSpec

L = TypeVar("L", bound=LookupText)
S = TypeVar("S", bound=DraftState)

#: Tokens that the lookup ingests as they are committed; more wait for the next batch.
_MAX_ROWS_AT_ONCE: Final = 64


class CombinedState(Generic[L, S]):
    """One session in both drafters."""

    __slots__ = ("_has_long_match", "drafter", "lookup", "other")

    def __init__(self, drafter: CombinedDrafter[L, S], lookup: L, other: S) -> None:
        self.drafter = drafter
        self.lookup = lookup
        self.other = other
        #: Whether the lookup drafts next; None: not known for the committed tokens yet.
        self._has_long_match: bool | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        return self.other.token_ids

    @property
    def looks_up(self) -> bool:
        """Whether the lookup drafts next."""
        if self.lookup.num_pending:
            return False
        if self._has_long_match is None:
            self._has_long_match = self.drafter.matches_long(self)
        return self._has_long_match

    @property
    def num_pending(self) -> int:
        """Tokens to ingest before it can draft: none if the lookup drafts, whatever the other one has missed."""
        return 0 if self.looks_up else max(self.lookup.num_pending, self.other.num_pending)

    def reset_match(self) -> None:
        """The committed tokens have changed."""
        self._has_long_match = None


Job = DraftJob[CombinedState[L, S]]


class CombinedDrafter(Drafter[CombinedState[L, S]], Generic[L, S]):
    """Drafts by ``lookup`` where that finds a long match, by ``other`` everywhere else.

    Why this is lossless under every rule. The greedy and the coupled rule take any proposal. A ratio rule takes a draft
    x ~ q if q is what x was drawn from, given all that was known when it was decided to propose x: a decision that
    looks at x changes that. (Where p = q = (.7, .3), to propose token 0 in place of a token 1 that was drawn, and still
    to call it a draw from q, makes the text all zeros.) Here the decision is a function of the committed tokens and of
    past outputs alone; it is made before anything is drawn, once, and stands whatever is drawn then. What
    is looked up is such a function as well and goes without q, so it is verified as a draw from a one-hot q, which it
    is. What the other drafter draws goes with its own q.
    """

    def __init__(self, lookup: LookupDrafter[L], other: Drafter[S], settings: SpeculativeSettings) -> None:
        self._lookup = lookup
        self._other = other
        self.info: ModelInfo = replace(
            other.info,
            name=f"{lookup.info.name} and {other.info.name}",
            method="+".join(settings.methods),
            num_speculative_tokens=settings.num_speculative_tokens,
        )

    def open(self, spec: SessionSpec) -> CombinedState[L, S]:
        """A state of each."""
        other = self._other.open(spec)
        return CombinedState(self, self._lookup.open(spec), other)

    def advance(
        self,
        state: CombinedState[L, S],
        keep: int,
        token_ids: Sequence[int],
        hidden_states: Sequence[HiddenStates] = (),
    ) -> None:
        """Tell both. The lookup ingests a few tokens at once, to find out whether it has a long match."""
        self._other.advance(state.other, keep, token_ids, hidden_states)
        self._lookup.advance(state.lookup, keep, token_ids)
        if state.lookup.num_pending <= _MAX_ROWS_AT_ONCE:
            state.lookup.ingest(state.lookup.num_pending)
        state.reset_match()

    async def read_state_map(self) -> bytes:
        """The other drafter's."""
        return await self._other.read_state_map()

    def num_cached_tokens(self, state: CombinedState[L, S]) -> int:
        """Those of the other drafter."""
        return self._other.num_cached_tokens(state.other)

    def room(self, state: CombinedState[L, S]) -> int:
        """That of the one which drafts."""
        return self._lookup.room(state.lookup) if state.looks_up else self._other.room(state.other)

    def matches_long(self, state: CombinedState[L, S]) -> bool:
        """Whether the lookup shall draft after the tokens it has ingested.

        It shall after a long match, and after any where the other drafter has no room.
        """
        match = self._lookup.look_up(state.lookup, self.info.num_speculative_tokens)
        long = self._lookup.long_match if self._other.room(state.other) > 0 else 1
        return bool(match.token_ids) and match.length >= long

    async def draft(self, batch: Sequence[Job[L, S]]) -> list[Draft]:
        """The other drafter's part of the batch in one call, what is looked up right here."""
        found, jobs = self._split(batch)
        if jobs:
            drafted = await self._other.draft(list(jobs.values()))
        else:
            drafted = []
            await asyncio.sleep(0)
        return self._join(batch, found, dict(zip(jobs, drafted, strict=True)))

    def _split(self, batch: Sequence[Job[L, S]]) -> tuple[dict[int, Draft], dict[int, DraftJob[S]]]:
        """What is looked up, and the jobs of the other drafter, by their places in the batch."""
        found: dict[int, Draft] = {}
        jobs: dict[int, DraftJob[S]] = {}
        for at, job in enumerate(batch):
            draft = self._look_up(job) if job.num_tokens else None
            if draft is not None:
                found[at] = draft
                continue
            other = job.state.other
            num_rows = min(job.num_rows, other.num_pending)
            if num_rows or (job.num_tokens and self._other.room(other) > 0):
                jobs[at] = _of_state(job, other, num_rows=num_rows)
        return found, jobs

    def _look_up(self, job: Job[L, S]) -> Draft | None:
        """What is looked up for a job; None where the other drafter has to draft."""
        state = job.state
        # A chain in place of a tree is as long as that may be deep.
        num_tokens = job.num_tokens if job.tree is None else min(job.num_tokens, job.tree.depth)
        own = _of_state(job, state.lookup, num_tokens=num_tokens)
        return self._lookup.draft_one(own) if state.looks_up else None

    def _join(self, batch: Sequence[Job[L, S]], found: dict[int, Draft], drafted: dict[int, Draft]) -> list[Draft]:
        """All drafts in the order of the batch; nothing failed, so the lookup ingests prompts, too."""
        drafts = []
        for at, job in enumerate(batch):
            lookup = job.state.lookup
            if lookup.num_pending:
                lookup.ingest(min(job.num_rows, lookup.num_pending))
            drafts.append(found.get(at) or drafted.get(at) or Draft())
        return drafts

    def close(self, state: CombinedState[L, S]) -> None:
        """Close both."""
        self._lookup.close(state.lookup)
        self._other.close(state.other)

    def occupancy(self) -> Occupancy:
        """The other drafter's blocks."""
        return self._other.occupancy()

    async def shutdown(self) -> None:
        """End both."""
        await self._lookup.shutdown()
        await self._other.shutdown()


def _of_state(job: DraftJob[Any], state: S, **changes: Any) -> DraftJob[S]:
    """The same job for one of the two drafters."""
    return replace(job, state=state, **changes)
