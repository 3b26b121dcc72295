"""The interface of pacing: how many tokens to draft for each session and round, zero included.

Nothing here awaits, reads a clock or draws a random number, but for names: observations go in with their time, answers
come out.

Legal under every rule: an answer depends on verdicts and times of past rounds only, never on the tokens of the round
it is for, nor on anything drawn with them.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway.pacing.stats import PacingStats
from specdec.types import RoundTimings, Verdict


class Pace(Protocol):
    """What a decoding loop asks and tells, one session at a time."""

    @property
    def group(self) -> str:
        """Name of the sessions that are paced together, which targets get; empty: none."""
        ...

    @property
    def k(self) -> int:
        """Drafted tokens last asked for; 0: the target decodes in multi-step."""
        ...

    @property
    def speedup(self) -> float:
        """Expected speed of such rounds over plain decoding; 1 where they are not known to be faster."""
        ...

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """Tokens to draft for the next round, with ``num_remaining`` still to be generated; 0: decode in multi-step."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether ``k`` is 0 and stays it: nothing was learned, by any session, since this one last recorded."""
        ...

    def record(
        self, verdict: Verdict, num_asked: int, now_ns: int, *, tree_depth: int | None = None, is_stream: bool = False
    ) -> None:
        """A verdict arrived.

        ``num_asked``: drafted tokens that were asked for, less those that were cut off before verification; 0: none.
        ``tree_depth``: of a tree, how many of its tokens might have been accepted; None for a chain. ``is_stream``: a
        step beside a stream.
        """
        ...

    def record_plain(self, num_verdicts: int, num_tokens: int, timings: RoundTimings, now_ns: int) -> None:
        """Verdicts that nothing was asked for between arrived, the last one with these ``timings`` at ``now_ns``."""
        ...

    def skip(self, timings: RoundTimings, now_ns: int) -> None:
        """The verdict of a round arrived whose tokens no draft service drafted: it tells no price."""
        ...

    def leave(self) -> None:
        """The session is over. Idempotent."""
        ...


class Pacer(Protocol):
    """Pacing of one target: makes the pace of each of its sessions."""

    @property
    def stats(self) -> PacingStats:
        """What it did since the start."""
        ...

    def session(self, limit: int, drafter: str = "") -> Pace:
        """The pace of a new session that drafts ``limit`` tokens a round at most, by the method ``drafter``."""
        ...


class FixedPace:
    """As many drafted tokens as allowed, in every round."""

    group: Final = ""
    speedup: Final = 1.0

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.k = 0

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """All that the limit and the rest of the request allow."""
        self.k = max(0, min(self._limit, num_remaining - 1))
        return self.k

    @property
    def is_settled(self) -> bool:
        """Whether nothing is drafted."""
        return not self.k

    def record(
        self, verdict: Verdict, num_asked: int, now_ns: int, *, tree_depth: int | None = None, is_stream: bool = False
    ) -> None:
        """Do nothing: nothing is learned."""

    def record_plain(self, num_verdicts: int, num_tokens: int, timings: RoundTimings, now_ns: int) -> None:
        """Do nothing: nothing is learned."""

    def skip(self, timings: RoundTimings, now_ns: int) -> None:
        """Do nothing: nothing is learned."""

    def leave(self) -> None:
        """Do nothing: nothing is held."""
