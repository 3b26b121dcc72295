"""Lookups as drafters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from draft_service.drafters.base import Draft, Drafter, DraftJob
from specdec import __version__
from specdec.lookup.base import Lookup, LookupText, Match
from specdec.lookup.ngram import NgramIndex, NgramLookup
from specdec.lookup.suffix import SuffixLookup, SuffixSession
from specdec.settings import DraftSettings, SpeculativeSettings
from specdec.types import HiddenStates, ModelInfo, SessionSpec

T = TypeVar("T", bound=LookupText)


class LookupDrafter(Drafter[T], Generic[T]):
    """Drafts on the event loop by what a lookup finds."""

    def __init__(self, method: str, lookup: Lookup[T], num_speculative_tokens: int) -> None:
        self.lookup = lookup
        self.info = ModelInfo(
            name=method,
            architecture=method,
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            version=__version__,
        )

    @property
    def long_match(self) -> int:
        """See :class:`~specdec.lookup.base.Lookup`."""
        return self.lookup.long_match

    def open(self, spec: SessionSpec) -> T:
        """A text with everything pending."""
        return self.lookup.open(spec)

    def look_up(self, state: T, num_tokens: int) -> Match:
        """See :class:`~specdec.lookup.base.Lookup`."""
        return self.lookup.look_up(state, num_tokens)

    def advance(
        self, state: T, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Replace what follows the first ``keep`` tokens."""
        state.replace(keep, token_ids)

    async def draft(self, batch: Sequence[DraftJob[T]]) -> list[Draft]:
        """Ingest and look up on the event loop; other tasks run between two batches."""
        drafts = [self.draft_one(job) for job in batch]
        await asyncio.sleep(0)
        return drafts

    def draft_one(self, job: DraftJob[T]) -> Draft:
        """Do one job."""
        job.state.ingest(job.num_rows)
        return Draft(self.look_up(job.state, job.num_tokens).token_ids) if job.num_tokens else Draft()

    def close(self, state: T) -> None:
        """Tell the lookup."""
        self.lookup.close(state)


class NgramDrafter(LookupDrafter[NgramIndex]):
    """Drafts by prompt lookup over prompt and output."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        super().__init__("ngram", NgramLookup(settings), settings.num_speculative_tokens)

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """A drafter with these settings."""
        return cls(settings.speculative)


class SuffixDrafter(LookupDrafter[SuffixSession]):
    """Drafts by looking up in suffix trees."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        super().__init__("suffix", SuffixLookup(settings), settings.num_speculative_tokens)

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """A drafter with these settings. The first one on a machine compiles the trees, in another thread."""
        return await asyncio.to_thread(cls, settings.speculative)
