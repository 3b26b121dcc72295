"""Pacing: how many tokens to draft for each session and round, zero included, learned while serving.

One :class:`~gateway.pacing.target_pacer.TargetPacer` per target holds what all its sessions have in common (which mode
is faster, what a round costs, acceptance), one :class:`AdaptivePace` per session its own acceptance and whether it
probes. Nothing here awaits, reads a clock or draws a random number: observations go in with their time, answers come
out.

Legal under every rule: an answer depends on verdicts and times of past rounds only, never on the tokens of the round
it is for, nor on anything drawn with them.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway.pacing.target_pacer import MIN_CHUNK, TargetPacer
from specdec.scheduling.acceptance import Acceptance
from specdec.types import Verdict

#: A probe is so many rounds of so many drafted tokens.
PROBE_ROUNDS: Final = 3
PROBE_TOKENS: Final = 2
#: Tokens decoded while waiting for a draft after which a probe is given up.
MAX_PROBE_WAIT: Final = 64


class Pace(Protocol):
    """What a decoding loop asks and tells, one session at a time."""

    @property
    def k(self) -> int:
        """Drafted tokens last asked for; 0: the target decodes in multi-step."""
        ...

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """Tokens to draft for the next round, with ``num_remaining`` still to be generated; 0: decode in multi-step."""
        ...

    def num_multi_step_tokens(self, num_remaining: int, now_ns: int) -> int:
        """Tokens to decode in multi-step before asking again, where nothing is to be drafted."""
        ...

    def record(
        self, verdict: Verdict, num_asked: int, draft_ns: int, now_ns: int, *, tree_depth: int | None = None
    ) -> None:
        """A verdict arrived.

        ``num_asked``: drafted tokens that were asked for, less those that were cut off before verification, and
        ``draft_ns``: what drafting them took; both 0 for multi-step tokens. ``tree_depth``: of a tree, how many of
        its tokens might have been accepted; None for a chain.
        """
        ...

    def leave(self) -> None:
        """The session is over. Idempotent."""
        ...


class FixedPace:
    """Always as many drafted tokens as allowed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.k = 0

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """All that the limit and the rest of the request allow."""
        self.k = max(0, min(self._limit, num_remaining - 1))
        return self.k

    def num_multi_step_tokens(self, num_remaining: int, now_ns: int) -> int:
        """Asked only when nothing may be drafted at the moment: soon that may change."""
        return min(MIN_CHUNK, num_remaining)

    def record(
        self, verdict: Verdict, num_asked: int, draft_ns: int, now_ns: int, *, tree_depth: int | None = None
    ) -> None:
        """Nothing is learned."""

    def leave(self) -> None:
        """Nothing is held."""


class AdaptivePace:
    """As many drafted tokens as bring most tokens per second for all sessions on the target.

    A draft that proposes trees (which its first proposal shows) is asked for whole ones or none: how much each token of
    a tree adds depends on the others. Acceptance is learned by depth then.
    """

    def __init__(self, lane: TargetPacer, limit: int) -> None:
        self.limit = limit
        self._acceptance = Acceptance(lane.totals)
        self._lane = lane
        self.k = 0
        #: Rounds left of the probe that is under way, None while there is none; tokens decoded while its draft was not
        #: there yet.
        self._probe_left: int | None = None
        self._probe_wait = 0
        #: Whether the last verdict was a round's, not of multi-step tokens, and when it came; None before the first.
        self._in_rounds: bool | None = None
        self._last_ns: int | None = None
        #: Tokens on the longest path of the draft's trees; None while it proposes chains.
        self._tree_depth = lane.tree_depth
        #: The turn of the contest in which the session was asked last, and the one whose way it decodes.
        self._asked_turn = self._settled_turn = lane.contest.turn
        lane.sessions[self] = None
        lane.num_members += limit > 0

    @property
    def survival(self) -> list[float]:
        """The probability that a round accepts at least 1, 2, … ``limit`` drafted tokens; of a tree each token's equal
        share of the number expected to be accepted.
        """
        if self._tree_depth is None:
            return self._acceptance.survival(self.limit)
        expected = sum(self._acceptance.survival(self._tree_depth))
        return [expected / self.limit] * self.limit

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`Pace`."""
        lane, limit = self._lane, max(0, min(self.limit, num_remaining - 1))
        if limit and self._tree_depth is not None:
            limit = self.limit  # the draft keeps its trees as low as the rest of the request is short
        if not limit:
            k = 0
        elif self._probe_left is not None:
            k = PROBE_TOKENS
        else:
            k = lane.num_draft_tokens(self.survival, now_ns)
            if not k and not self.k and num_remaining > PROBE_ROUNDS * (PROBE_TOKENS + 1) and lane.may_probe(now_ns):
                lane.begin_probe(now_ns)
                self._probe_left, self._probe_wait = PROBE_ROUNDS, 0
                k = PROBE_TOKENS
        self._want(min(k, limit) if self._tree_depth is None or not k else limit, now_ns)
        self._asked_turn = lane.contest.turn
        return self.k

    def num_multi_step_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`Pace`."""
        return min(self._lane.num_multi_step_tokens(now_ns), num_remaining)

    def record(
        self, verdict: Verdict, num_asked: int, draft_ns: int, now_ns: int, *, tree_depth: int | None = None
    ) -> None:
        """See :class:`Pace`."""
        lane, num_tokens = self._lane, len(verdict.token_ids)
        lane.observe_step(verdict.timings)
        in_rounds, before, last_ns = num_asked > 0, self._in_rounds, self._last_ns
        self._in_rounds, self._last_ns = in_rounds, now_ns
        lane.num_in_rounds += in_rounds - bool(before)
        if self.limit:
            lane.tally.num_rounds += in_rounds
            lane.tally.num_plain += not in_rounds
            lane.tally.num_draft_tokens += num_asked
        if in_rounds:
            depth = num_asked if tree_depth is None else tree_depth
            # Near the end of a request trees are low.
            self._tree_depth = None if tree_depth is None else max(tree_depth, self._tree_depth or 0)
            lane.tree_depth = self._tree_depth
            self._acceptance.observe(depth, verdict.num_accepted)
            lane.totals.observe(depth, verdict.num_accepted)
            lane.forecast.observe_draft(verdict.num_draft_tokens, draft_ns)
        if last_ns is not None and num_tokens:
            cycle_ns = now_ns - last_ns
            # The first cycle after a change is not typical of what follows.
            if before is in_rounds and (in_rounds or not self.k):
                lane.observe_cycle(verdict, cycle_ns, num_tokens, in_rounds=in_rounds)
            if self.limit:
                counts = self._settled_turn == lane.contest.turn and self._probe_left is None
                lane.settle(cycle_ns, num_tokens, counts=counts)
        if in_rounds is (self.k > 0):
            self._settled_turn = self._asked_turn
        if self._probe_left is not None:
            self._probe_left -= in_rounds
            self._probe_wait += 0 if in_rounds else num_tokens
            if self._probe_left <= 0 or self._probe_wait > MAX_PROBE_WAIT:
                self._end_probe(now_ns)

    def leave(self) -> None:
        """See :class:`Pace`."""
        if self in self._lane.sessions:
            self._want(0, self._last_ns or 0)
            self._lane.num_in_rounds -= bool(self._in_rounds)
            self._lane.num_members -= self.limit > 0
            del self._lane.sessions[self]

    def _want(self, k: int, now_ns: int) -> None:
        """Drafted tokens from now on; a probe without any is over."""
        self.k = k
        if not k and self._probe_left is not None:
            self._end_probe(now_ns)

    def _end_probe(self, now_ns: int) -> None:
        self._probe_left = None
        self._lane.end_probe(self.survival, now_ns)
