"""Pacing of one target: times are learned per load and drafter from all its sessions, acceptance per text.

A session drafts the number of tokens that brings most tokens per second of session time, zero included. Both sides of
that comparison are measured: what a round and a plain token cost at this load
(:class:`~gateway.pacing.round_times.RoundTimes`), and how much of this text's drafts is accepted
(:class:`~gateway.pacing.text_acceptance.TextAcceptance`). Trials measure the mode that was not measured last.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final
from uuid import uuid4

from gateway.pacing.lookup_pacer import LookupPacer
from gateway.pacing.round_times import Others, RoundTimes
from gateway.pacing.stats import Mode, PacingStats
from gateway.pacing.text_acceptance import (
    STREAM_GUESS,
    STREAM_HALF_LIFE,
    TextAcceptance,
    expected_tokens,
    usual_rates,
)
from specdec.types import RoundTimings, Verdict

#: Texts that say what is usual. The first one was never seen, so the optimism ends after some bad texts.
RECENT_TEXTS: Final = 6
#: Methods whose prices are kept: clients that bring a draft have one each.
MAX_DRAFTERS: Final = 64


class TargetPacer:
    """What all sessions on one target have in common."""

    def __init__(self, lookups: LookupPacer | None = None) -> None:
        """``lookups``: those of the same sessions."""
        self.stats = PacingStats()
        self.num_sessions = 0
        self.lookups = lookups or LookupPacer()
        self._drafters: dict[str, DrafterPacer] = {}

    def session(self, limit: int, drafter: str = "") -> SessionPace:
        """The pace of a new session that drafts ``limit`` tokens a round at most, by the method ``drafter``."""
        return SessionPace(self.drafter_pacer(drafter), limit)

    def drafter_pacer(self, drafter: str = "") -> DrafterPacer:
        """What the sessions that draft by one method have in common: the cost of one method says nothing of another."""
        pacer = self._drafters.pop(drafter, None) or DrafterPacer(self)
        self._drafters[drafter] = pacer  # the newest is the last one
        if len(self._drafters) > MAX_DRAFTERS:
            del self._drafters[next(iter(self._drafters))]
        return pacer


class DrafterPacer:
    """What the sessions on one target that draft by one method have in common."""

    def __init__(self, target: TargetPacer) -> None:
        self.target = target
        #: Names them to targets.
        self.group: Final = uuid4().hex
        #: Open sessions that may draft by this method.
        self.num_sessions = 0
        #: Drafted tokens of a round at most, in any session.
        self.limit = 0
        #: Levels of the trees that the draft proposes; None while it proposes chains.
        self.tree_depth: int | None = None
        #: Whether it streams chains, which are verified whole, too; and what is accepted beside all of them.
        self.streams = False
        self.streamed = TextAcceptance(STREAM_HALF_LIFE, STREAM_GUESS)
        #: Texts that had a round.
        self.recent = deque((TextAcceptance(),), maxlen=RECENT_TEXTS)
        #: What is usual in them, and ``num_changes`` when it was.
        self._usual: tuple[int, list[float]] = (-1, [])
        self._times: dict[int, RoundTimes] = {}
        #: Whether sessions look up, as far as it was noted.
        self._is_looking = False
        self._last_times: RoundTimes | None = None
        #: Counts what may change the choice of sessions that decode plainly.
        self.num_changes = 0
        #: What open sessions expect of drafting: the sum of their speeds over plain decoding, and how many they are.
        self.sum_speedups, self.num_expecting = 0.0, 0

    @property
    def times(self) -> RoundTimes:
        """Times at the present load: numbers of sessions within a factor of about 1.4 share them."""
        load = round(math.log2(max(self.target.num_sessions, 1)))
        if load not in self._times:
            nearest = min(self._times, key=lambda other: abs(other - load), default=None)
            self._times[load] = RoundTimes(None if nearest is None else self._times[nearest])
        return self._times[load]

    @property
    def least_speedup(self) -> float:
        """Speed over plain decoding from which on a session drafts. It does what is better for all on the mean, unless
        it gains more by the other than is lost where some draft and others do not.
        """
        if self.num_expecting < 2:
            return 1.0
        mixing = self.times.mixing
        return 1.0 / mixing if self.sum_speedups > self.num_expecting else mixing

    def usual(self, num_tokens: int) -> list[float]:
        """Rates of the first ``num_tokens`` positions in the recent texts; they are looked at once a window."""
        since, rates = self._usual
        if since != self.num_changes or len(rates) < num_tokens:
            rates = usual_rates(self.recent, max(num_tokens, self.limit))
            self._usual = self.num_changes, rates
        return rates[:num_tokens]

    def speedups(self, text: TextAcceptance, limit: int) -> dict[int, float]:
        """Expected speed over plain decoding of rounds with 1, 2, … ``limit`` drafted tokens; of whole trees alone."""
        times, depth = self.times, limit if self.tree_depth is None else min(self.tree_depth, limit)
        rates = self.streamed.own_rates(depth) if self.streams else text.rates(self.usual(depth))
        expected = expected_tokens(rates)
        if self.tree_depth is not None:
            return {limit: expected[-1] / times.round_cost(limit)}
        return {k: tokens / times.round_cost(k) for k, tokens in enumerate(expected) if k}

    @property
    def trial(self) -> Mode | None:
        """The mode that is tried now."""
        return None if self._is_looking else self.times.trial

    def record(self, cycle_ns: int, num_verdicts: int, num_tokens: int, num_asked: int, others: Others) -> None:
        """A session took ``cycle_ns`` for a round with ``num_asked`` drafted tokens, or for ``num_tokens`` others."""
        times, stats = self.times, self.target.stats
        trial = times.trial
        if trial is not None:
            stats.trial_s += cycle_ns / max(self.num_sessions, 1) / 1e9
        times.streams = self.streams
        has_changed = times.record(
            self.num_sessions, cycle_ns, num_tokens, num_asked, others, num_verdicts=num_verdicts
        )
        if trial is not None and times.trial is None:
            stats.num_trials[trial] += 1
        if has_changed or times is not self._last_times:
            self.num_changes += 1
        self._last_times = times

    def note_looking(self) -> bool:
        """Whether sessions look up. Looked-up rounds make steps longer, so nothing is measured nor tried then. What was
        measured so held on where texts changed: wrong predictions after right ones had 0.70 of plain decoding for
        seconds (embedded, 32 sessions), and right ones 1.65, 1.57 in place of 1.96, 1.70.
        """
        was_looking, self._is_looking = self._is_looking, self.target.lookups.is_looking
        self.num_changes += self._is_looking != was_looking
        return self._is_looking


class SessionPace:
    """The pace of one session: as many drafted tokens as bring most tokens per second.

    A draft that proposes trees (which its first proposal shows) is asked for whole ones or none: how much each token of
    a tree adds depends on the others. Acceptance is learned by depth then.
    """

    def __init__(self, drafter: DrafterPacer, limit: int) -> None:
        self.k = 0
        self.speedup = 1.0
        self.group = drafter.group if limit else ""
        self._limit = limit
        self._drafter = drafter
        self._acceptance = TextAcceptance()
        self._last_ns: int | None = None
        #: Whether sessions looked up then.
        self._was_looking = False
        #: What other sessions did since it was opened, as the last verdict told.
        self._others = Others()
        self._is_open = True
        #: Speed over plain decoding that it expects of drafting; None: it was not asked yet.
        self._expected: float | None = None
        #: Whether the text had a round, so that it is one of the recent ones.
        self._is_known = False
        #: ``num_changes`` of the drafter when this session last chose.
        self._num_changes = -1
        #: The same when it last recorded.
        self._window = -1
        drafter.limit = max(limit, drafter.limit)
        drafter.num_sessions += limit > 0
        drafter.target.num_sessions += 1

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`~gateway.pacing.pace.Pace`."""
        limit = max(0, min(self._limit, num_remaining - 1))
        if self.k or self._num_changes != self._drafter.num_changes:
            self._num_changes, self.speedup = self._drafter.num_changes, 1.0
            self.k = self._choose(limit) if limit else 0
        return self.k

    @property
    def is_settled(self) -> bool:
        """See :class:`~gateway.pacing.pace.Pace`."""
        return not self._limit or (not self.k and self._window == self._drafter.num_changes)

    def record(
        self, verdict: Verdict, num_asked: int, now_ns: int, *, tree_depth: int | None = None, is_stream: bool = False
    ) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        drafter = self._drafter
        if num_asked:
            drafter.streams = is_stream
            # Near the end of a request trees are low.
            drafter.tree_depth = None if tree_depth is None else max(tree_depth, drafter.tree_depth or 0)
            if not self._is_known and not is_stream:
                self._is_known = True
                drafter.recent.append(self._acceptance)
            acceptance = drafter.streamed if is_stream else self._acceptance
            acceptance.observe(num_asked if tree_depth is None else tree_depth, verdict.num_accepted)
        self._record(1, len(verdict.token_ids), num_asked, verdict.timings, now_ns)

    def record_plain(self, num_verdicts: int, num_tokens: int, timings: RoundTimings, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`. Where a window ended meanwhile, they belong to none."""
        if num_verdicts > 1 and self._window != self._drafter.num_changes:
            self._last_ns = None
        self._record(num_verdicts, num_tokens, 0, timings, now_ns)

    def _record(self, num_verdicts: int, num_tokens: int, num_asked: int, timings: RoundTimings, now_ns: int) -> None:
        if not self._limit:
            return
        drafter, stats = self._drafter, self._drafter.target.stats
        stats.num_verdicts[Mode.SPECULATIVE if num_asked else Mode.PLAIN] += num_verdicts
        stats.num_draft_tokens += num_asked
        last_ns, self._last_ns = self._last_ns, now_ns
        others = self._since_last(timings)
        was_looking, self._was_looking = self._was_looking, drafter.note_looking()
        if last_ns is not None and num_tokens:
            stats.busy_s += (now_ns - last_ns) / max(drafter.target.num_sessions, 1) / 1e9
            if not (was_looking or self._was_looking):
                drafter.record(now_ns - last_ns, num_verdicts, num_tokens, num_asked, others)
        self._window = drafter.num_changes

    def _since_last(self, timings: RoundTimings) -> Others:
        """What other sessions did since this session's verdict before: its part, for each of the group tells all."""
        before, self._others = self._others, Others(timings.others_tokens, timings.others_ns)
        count = max(self._drafter.num_sessions, 1)
        # After a move to another target it begins at zero.
        return Others(*(max(now - then, 0) / count for now, then in zip(self._others, before, strict=True)))

    def skip(self, timings: RoundTimings, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._since_last(timings)
        self._last_ns, self._was_looking = now_ns, self._drafter.note_looking()

    def leave(self) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        if self._is_open:
            self._is_open = False
            self._expect(None)
            self._drafter.num_sessions -= self._limit > 0
            self._drafter.target.num_sessions -= 1

    def _choose(self, limit: int) -> int:
        drafter = self._drafter
        times = drafter.times
        if drafter.tree_depth is not None:
            limit = self._limit  # the draft keeps trees as low as the rest of the request is short
        if drafter.trial is Mode.PLAIN or not times.is_measured:
            return 0
        if drafter.trial is Mode.SPECULATIVE:
            return limit  # fewer tokens would not show long copies
        speedups = drafter.speedups(self._acceptance, limit)
        best = max(speedups, key=speedups.__getitem__)
        self._expect(speedups[best])
        if speedups[best] <= drafter.least_speedup or not times.pays:
            return 0
        self.speedup = speedups[best]
        return best

    def _expect(self, speedup: float | None) -> None:
        """Tell the others what this session expects of drafting; None: nothing any more."""
        drafter, before = self._drafter, self._expected
        drafter.sum_speedups += (speedup or 0.0) - (before or 0.0)
        drafter.num_expecting += (speedup is not None) - (before is not None)
        self._expected = speedup
