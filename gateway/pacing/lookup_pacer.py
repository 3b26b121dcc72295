"""Pacing of lookups: how many tokens of a match are worth a round at this load.

Looking up costs nothing, and how often matches are right is learned from what the target decodes by itself. A round is
worth it where the tokens it is expected to bring are more than all sessions lose by it: by its rows, whose price the
times of steps tell, and by the rest, which windows with and without lookups tell
(:class:`~gateway.pacing.lookup_times.LookupTimes`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from gateway.pacing.lookup_times import LookupTimes
from gateway.pacing.match_acceptance import MatchAcceptance
from specdec.lookup.base import Match
from specdec.scheduling.costs import StepCost
from specdec.types import RoundTimings

#: Verdicts between two lookups of a text in which nothing is worth a round, at most: copies that are worth rounds are
#: longer.
MAX_PAUSE: Final = 8


class LookupPacer:
    """What the sessions on one target have in common."""

    def __init__(self) -> None:
        #: Open sessions, and those of them that look up.
        self.num_sessions = self.num_looking = 0
        #: How far matches in other texts are right, by the methods that find them.
        self.acceptances: defaultdict[tuple[str, ...], MatchAcceptance] = defaultdict(MatchAcceptance)
        #: By load, of which prices depend: numbers of sessions within a factor of about 1.4 share them.
        self._times: defaultdict[int, LookupTimes] = defaultdict(LookupTimes)
        self.times = self._times[0]
        self._forget()

    def _forget(self) -> None:
        """Steps take another time than before."""
        self._cost = StepCost()
        self._step = RoundTimings()

    @property
    def is_looking(self) -> bool:
        """Whether sessions may look up at the moment."""
        return self.num_looking > 0 and not self.times.is_off

    def add_sessions(self, count: int, *, look_up: bool) -> None:
        """So many more are open."""
        self.num_sessions += count
        self.num_looking += count * look_up
        self.times = self._times[round(math.log2(max(self.num_sessions, 1)))]

    def record_cycle(
        self,
        cycle_ns: int,
        num_tokens: int,
        num_rounds: float,
        saved: float,
        *,
        num_verdicts: int,
        looks_up: bool,
        is_drafting: bool,
    ) -> None:
        """See :meth:`~gateway.pacing.lookup_times.LookupTimes.record`."""
        if self.times.record(
            self.num_sessions,
            cycle_ns,
            num_tokens,
            num_rounds,
            saved,
            num_verdicts=num_verdicts,
            num_looked=num_verdicts * looks_up,
            num_drafting=num_verdicts * is_drafting,
        ):
            self._forget()

    def record(self, timings: RoundTimings) -> None:
        """Learn what a step took; its sessions tell the same."""
        last = self._step
        spent_ns = timings.forward_ns + timings.verify_ns
        if not timings.batch_rows or spent_ns == last.forward_ns + last.verify_ns:
            return
        self._cost.observe(timings.batch_rows, timings.batch_sessions, timings.batch_context, spent_ns)
        self._step = timings

    def row_prices(self, num_tokens: int) -> Iterator[float]:
        """Plain tokens that all sessions lose by the rows of 0, 1, … ``num_tokens`` drafted tokens, increasing; each
        takes microseconds.
        """
        sessions, rows, context = self._step.batch_sessions, self._step.batch_rows, self._step.batch_context
        if not sessions:
            yield from [0.0] * (num_tokens + 1)
            return
        step_ns = self._cost.predict(sessions, sessions, context)
        before_ns = self._cost.predict(rows, sessions, context)
        for count in range(num_tokens + 1):
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
        """``methods``: what looks up; none: the session looks up nothing. ``is_fixed``: all that is found is drafted.
        ``is_predicted``: it is a client's prediction, of which other texts tell nothing.
        """
        self._pacer = pacer
        self._looks_up = bool(methods) or is_predicted
        self._is_fixed = is_fixed
        known = None if is_predicted else pacer.acceptances[methods]
        self._acceptance = MatchAcceptance(known, is_predicted=is_predicted)
        #: The latest match while all that followed was right, and how many tokens that were.
        self._match: Match | None = None
        self._num_right = 0
        #: Of the cycle since the latest verdict: when and in which window it began, the rounds asked for in it, and the
        #: tokens that they should save.
        self._last_ns: int | None = None
        self._window: tuple[LookupTimes, int] | None = None
        self._num_rounds = self._saved = 0.0
        #: Verdicts from one lookup to the next, and since the latest one: the first verdict is not recorded.
        self._pause, self._num_passed = 1, 1
        self._is_open = True
        pacer.add_sessions(1, look_up=self._looks_up)

    @property
    def pause_left(self) -> int:
        """Verdicts after which nothing is looked up, from now on, if no window ends."""
        if self._is_fixed:
            return 0
        if self._pacer.times.is_off:
            return MAX_PAUSE
        return max(0, self._pause - self._num_passed - 1)

    @property
    def is_settled(self) -> bool:
        """Whether no windows of the other kind have begun since this session last recorded."""
        times = self._pacer.times
        return self._window == (times, times.num_changes)

    def record(
        self,
        token_ids: Sequence[int],
        timings: RoundTimings,
        now_ns: int,
        *,
        num_verdicts: int = 1,
        is_drafting: bool = False,
    ) -> None:
        """Tokens were committed, the last ones in a step that took these ``timings``: compare them with the latest
        match. ``is_drafting``: a draft drafts what is not looked up.
        """
        times = self._pacer.times
        if not self._pacer.num_looking:
            self._last_ns = None
            return
        if self._looks_up and not times.is_off:
            self._pacer.record(timings)
        self._record_time(times, num_verdicts, len(token_ids), now_ns, is_drafting=is_drafting)
        self._num_passed += num_verdicts
        if self._match is None:
            return
        expected = self._match.token_ids[self._num_right :]
        for found, token in zip(expected, token_ids, strict=False):
            if found != token:
                self._end_match(1)
                return
            self._num_right += 1
        if len(expected) <= len(token_ids):
            self._end_match()

    def _end_match(self, num_wrong: int = 0) -> None:
        """Learn how far the latest match was right; without a wrong token the rest is not known."""
        if self._match is not None:
            self._acceptance.observe(self._match.length, self._num_right + num_wrong, self._num_right)
        self._match, self._num_right = None, 0

    def _record_time(
        self, times: LookupTimes, num_verdicts: int, num_tokens: int, now_ns: int, *, is_drafting: bool
    ) -> None:
        # What began in a window of the other kind belongs to neither.
        if self._last_ns is not None and self._window == (times, times.num_changes):
            self._pacer.record_cycle(
                now_ns - self._last_ns,
                num_tokens,
                self._num_rounds,
                self._saved,
                num_verdicts=num_verdicts,
                looks_up=self._looks_up,
                is_drafting=is_drafting,
            )
        self._last_ns, self._window = now_ns, (times, times.num_changes)
        self._num_rounds = self._saved = 0.0

    def looks_up(self) -> bool:
        """Whether to look for a match after this verdict: the longer none was worth a round, the more rarely, for that
        takes time that the target may lack.
        """
        if self._is_fixed:
            return True
        if self._num_passed < self._pause or self._pacer.times.is_off:
            return False
        self._num_passed, self._pause = 0, min(2 * self._pause, MAX_PAUSE)
        return True

    def num_draft_tokens(self, match: Match, speedup: float) -> int:
        """How many tokens of a match to draft, zero included.

        ``speedup``: speed over plain decoding of the draft's rounds, which this one takes the place of; 1: none are.
        """
        self._end_match()
        self._match = match
        count, times = len(match.token_ids), self._pacer.times
        if self._is_fixed:
            return count
        survival, following = self._acceptance.rates(match.length)
        best, gain, saved, tokens = 0, 0.0, 0.0, 1.0
        most = 1.0 + survival / max(1.0 - following, 1.0 / count)  # no length brings more
        if most <= speedup * (1.0 + times.price):
            return 0
        for num_tokens, rows in enumerate(self._pacer.row_prices(count)):
            cost = speedup * (1.0 + times.price + rows)
            if tokens - cost > gain:
                best, gain, saved = num_tokens, tokens - cost, tokens - speedup * (1.0 + rows)
            if most - cost <= gain:
                break  # longer rounds cost more
            tokens += survival
            survival *= following
        if best:
            self._pause = 1
            self._num_rounds += speedup
            self._saved += saved
        return best

    def leave(self) -> None:
        """The session is over. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pacer.add_sessions(-1, look_up=self._looks_up)
