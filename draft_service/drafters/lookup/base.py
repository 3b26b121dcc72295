"""What look-ups have in common: they continue a text by what followed the same tokens elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from draft_service.drafters.base import Draft, Drafter, DraftJob, DraftState


@dataclass(frozen=True, slots=True)
class Match:
    """A continuation that was found."""

    token_ids: tuple[int, ...] = ()
    #: How many of the last tokens stood in one place before, at most, and were continued there.
    length: int = 0


class LookupState(DraftState, Protocol):
    """What a look-up keeps of one session."""

    def take_in(self, num_tokens: int) -> None:
        """Take in the next ``num_tokens`` pending tokens."""
        ...


L = TypeVar("L", bound=LookupState)


class LookupDrafter(Drafter[L], Protocol[L]):
    """A drafter that looks up."""

    def look_up(self, state: L, num_tokens: int, assumed: Sequence[int] = ()) -> Match:
        """The best continuation, ``num_tokens`` at most, of the tokens taken in and those assumed after them.

        No token is pending. The state stays as it is.
        """
        ...

    @property
    def long_match(self) -> int:
        """Tokens that must have matched for a continuation to be better than a model's."""
        ...


def draft_by_lookup(drafter: LookupDrafter[L], job: DraftJob[L]) -> Draft:
    """Do one job; where it assumes the next token, that is the first one of what is found without it."""
    state = job.state
    state.take_in(state.num_pending if job.assumed else job.num_rows)
    if not job.num_tokens:
        return Draft()
    next_guesses = drafter.look_up(state, 1, job.assumed).token_ids if job.assumes_next else ()
    if job.assumes_next and not next_guesses:
        return Draft()
    return Draft(
        drafter.look_up(state, job.num_tokens, (*job.assumed, *next_guesses)).token_ids, next_guesses=next_guesses
    )
