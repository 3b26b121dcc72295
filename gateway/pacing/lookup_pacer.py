"""Pacing of lookups: how many tokens of a match are worth a round at this load.

Looking up costs nothing, and how often matches are right is learned from what the target decodes by itself. So there
are no trials. A round is worth it where the tokens it is expected to bring are more than all sessions of the step lose:
by its rows, whose price the times of steps tell, and by its messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from gateway.pacing.match_acceptance import MatchAcceptance
from specdec.lookup.base import Match
from specdec.scheduling.costs import StepCost
from specdec.types import RoundTimings, Verdict

#: Nanoseconds that the messages of a round take from the decoding of tokens. With 0 and with 1.2 ms eight sessions of
#: prose reach 0.97 and 1.00 of plain decoding, with this 1.10 (suffix and n-gram, medians of four windows each).
ROUND_NS: Final = 400_000
#: What it takes besides where the target waits for a session that is alone: 0.9 ms in all between two steps. It is
#: ``wire_ms`` of ``python -m benchmarks.predicted_outputs --files 1 --edits 1``: 0.7 and 1.3. Among eight sessions that
#: time is 11 to 27 ms a round, for it contains the steps of the others: no price can be learned from it.
WAIT_NS: Final = 500_000


class LookupPacer:
    """What the sessions on one target have in common."""

    def __init__(self) -> None:
        #: By the methods that look up: what they find differs.
        self._acceptances: defaultdict[tuple[str, ...], MatchAcceptance] = defaultdict(MatchAcceptance)
        self._cost = StepCost()
        self._step = RoundTimings()

    def record(self, verdict: Verdict) -> None:
        """Learn what a step took."""
        timings = verdict.timings
        if not timings.batch_rows:
            return
        spent_ns = timings.forward_ns + timings.verify_ns
        self._cost.observe(timings.batch_rows, timings.batch_sessions, timings.batch_context, spent_ns)
        self._step = timings

    def acceptance(self, methods: tuple[str, ...] = ()) -> MatchAcceptance:
        """How far matches that these methods found in other texts are right."""
        return self._acceptances[methods]

    @property
    def is_alone(self) -> bool:
        """Whether the latest step had one session: then a round costs least if the target waits for it."""
        return self._step.batch_sessions <= 1

    def prices(self, num_tokens: int) -> Iterator[float]:
        """Tokens that all sessions lose by rounds of 0, 1, … ``num_tokens`` drafted ones, increasing; each takes
        microseconds.
        """
        sessions, rows, context = self._step.batch_sessions, self._step.batch_rows, self._step.batch_context
        if not sessions:
            yield from [0.0] * (num_tokens + 1)
            return
        round_ns = ROUND_NS + WAIT_NS * self.is_alone
        step_ns = self._cost.predict(sessions, sessions, context)
        yield round_ns * sessions / step_ns
        before_ns = self._cost.predict(rows, sessions, context) - round_ns
        for count in range(1, num_tokens + 1):
            yield (self._cost.predict(rows + count, sessions, context) - before_ns) * sessions / step_ns


class LookupPace:
    """The pace of one session's lookups."""

    def __init__(
        self,
        pacer: LookupPacer,
        methods: tuple[str, ...] = (),
        *,
        is_fixed: bool = False,
        is_predicted: bool = False,
    ) -> None:
        """``methods``: what looks up. ``is_fixed``: all that is found is drafted. ``is_predicted``: it is a client's
        prediction, of which other texts tell nothing.
        """
        self._pacer = pacer
        self._is_fixed = is_fixed
        self._acceptance = MatchAcceptance(None if is_predicted else pacer.acceptance(methods))
        self._match: Match | None = None

    def record(self, verdict: Verdict) -> None:
        """A verdict arrived: compare it with the latest match."""
        self._pacer.record(verdict)
        match, self._match = self._match, None
        if match is None:
            return
        pairs = list(zip(match.token_ids, verdict.token_ids, strict=False))
        num_right = next((i for i, (found, token) in enumerate(pairs) if found != token), len(pairs))
        self._acceptance.observe(match.length, len(pairs), num_right)

    def num_draft_tokens(self, match: Match, speedup: float) -> tuple[int, bool]:
        """How many tokens of a match to draft, zero included, and whether the target is to wait for the next round.

        ``speedup``: speed over plain decoding of the draft's rounds, which this one takes the place of; 1: none are.
        """
        self._match = match
        count = len(match.token_ids)
        if self._is_fixed:
            return count, True
        survival, following = self._acceptance.rates(match.length)
        best, gain, tokens = 0, 0.0, 1.0
        most = 1.0 + survival / max(1.0 - following, 1.0 / count)  # no length brings more
        for num_tokens, price in enumerate(self._pacer.prices(count)):
            cost = speedup * (1.0 + price)
            if tokens - cost > gain:
                best, gain = num_tokens, tokens - cost
            if most - cost <= gain:
                break  # longer rounds cost more
            tokens += survival
            survival *= following
        return best, self._pacer.is_alone
