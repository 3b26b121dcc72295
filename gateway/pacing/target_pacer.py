"""Pacing of one target: times are learned per load and drafter from all its sessions, acceptance per text.

A session drafts the number of tokens that brings most tokens per second of session time, zero included. Both sides of
that comparison are measured: what a round and a plain token cost at this load
(:class:`~gateway.pacing.round_times.RoundTimes`), and how much of this text's drafts is accepted
(:class:`~gateway.pacing.text_acceptance.TextAcceptance`). A trial measures the mode that no session uses at the moment;
what trials lose is bounded by a share of the time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Final

from gateway.pacing.round_times import WINDOW_NS, WINDOW_VERDICTS, RoundTimes
from gateway.pacing.stats import Mode, PacingStats
from gateway.pacing.text_acceptance import SURPRISE, TextAcceptance
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS
from specdec.types import Verdict

#: Share of the time that trials may lose: a third of the 3 % that speculation may be slower than plain decoding.
ALLOWED_LOSS: Final = 0.01
#: Plain tokens of a session between two trials, at least: a change of mode has costs that no estimate knows.
TRIAL_PAUSE_TOKENS: Final = 512
#: A trial that was not measured ends after the time of so many windows: sessions that decode many tokens on one request
#: join late.
TRIAL_WINDOWS: Final = 8
#: Texts that say what is usual. The first one was never seen, so the optimism ends after eight bad texts.
RECENT_TEXTS: Final = 8
#: A new text is also compared with the recent texts for which speculation does not pay, if those differ from the others
#: by so many standard deviations and had so many rounds together. Fewer deviations are chance where speculation just
#: pays, fewer rounds where nearly all tokens are accepted.
MIN_DEVIATIONS: Final = 3.0
MIN_LOSING_ROUNDS: Final = 4
#: Methods whose prices are kept: clients that bring a draft have one each.
MAX_DRAFTERS: Final = 64


class TargetPacer:
    """What all sessions on one target have in common."""

    def __init__(self) -> None:
        self.stats = PacingStats()
        self.num_sessions = 0
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
        #: Open sessions that draft by this method.
        self.num_sessions = 0
        #: Levels of the trees that the draft proposes; None while it proposes chains.
        self.tree_depth: int | None = None
        #: The mode that all sessions try at the moment.
        self.trial: Mode | None = None
        #: Acceptance rates by position that are usual in the recent texts for which speculation pays.
        self.usual: list[float] = []
        #: Acceptance rates in the recent texts for which speculation does not pay; empty where there are no such texts,
        #: or where the difference may be chance.
        self._losing_rates: list[float] = []
        #: log(number of texts for which speculation does not pay / number of those for which it does).
        self._log_losing_odds = 0.0
        self._times: defaultdict[int, RoundTimes] = defaultdict(RoundTimes)
        self._first = TextAcceptance.first(MAX_SPECULATIVE_TOKENS)
        self._recent = deque((self._first,), maxlen=RECENT_TEXTS)
        #: For each recent text its best speedup, and the cost of a round of that length in plain tokens.
        self._best_rounds: list[tuple[float, float]] = []
        self._compared: tuple[RoundTimes, int] | None = None
        #: Counts what may change the choice of sessions that decode plainly.
        self.num_changes = 0
        self._trial_begin_ns = self._trial_end_ns = 0
        #: Nanoseconds that trials have lost beyond the allowed share of the time.
        self._debt_ns = 0.0

    @property
    def times(self) -> RoundTimes:
        """Times at the present load: numbers of sessions within a factor of about 1.4 share them."""
        load = round(math.log2(max(self.target.num_sessions, 1)))
        return self._times[load]

    def add_text(self, acceptance: TextAcceptance) -> None:
        """Take a text that had its first round for a recent one."""
        self._recent.append(acceptance)

    def speedups(self, expected: list[float]) -> list[float]:
        """Speed of rounds with 0, 1, … drafted tokens over plain decoding; ``expected`` are the tokens they commit."""
        times = self.times
        return [1.0, *(tokens / times.round_cost(k) for k, tokens in enumerate(expected) if k)]

    def expected_tokens(self, text: TextAcceptance, num_tokens: int) -> list[float]:
        """Tokens that rounds of a text with 0, 1, … ``num_tokens`` drafted ones are expected to commit."""
        return text.expected_tokens(num_tokens, self.usual, 0.0 if self._is_losing(text) else SURPRISE)

    def _is_losing(self, text: TextAcceptance) -> bool:
        """Whether a text is more likely one of the recent texts for which speculation does not pay."""
        if not self._losing_rates or text.is_empty:
            return False
        return text.log_likelihood(self._losing_rates) + self._log_losing_odds > text.log_likelihood(self.usual)

    def starts_with_rounds(self, num_remaining: int) -> bool:
        """Whether the first rounds of a text are worth their cost, if it is like one of the recent texts.

        A text for which speculation pays gains for the rest of the request. Another one loses until it is told from
        the usual ones: the smaller the loss of each round, the later.
        """
        gain = 0.0
        for speedup, cost in self._best_rounds:
            if speedup > 1.0:
                gain += num_remaining * (1.0 - 1.0 / speedup)
            elif speedup < 1.0:
                gain -= min(num_remaining * (1.0 / speedup - 1.0), SURPRISE * cost / (1.0 - speedup))
        return gain > 0.0

    def record(self, cycle_ns: int, num_tokens: int, num_asked: int, now_ns: int) -> None:
        """A session took ``cycle_ns`` for a round with ``num_asked`` drafted tokens, or for ``num_tokens`` others."""
        if self.times.record(self.num_sessions, cycle_ns, num_tokens, num_asked, now_ns):
            self.num_changes += 1
            self._update_trial(now_ns)

    def compare_texts(self, limit: int, now_ns: int) -> None:
        """Check the recent texts at the present load, once a window."""
        times = self.times
        if self._compared is not None and self._compared[0] is times and now_ns - self._compared[1] < WINDOW_NS:
            return
        self._compared = times, now_ns
        self._best_rounds = []
        good: list[TextAcceptance] = []
        losing: list[TextAcceptance] = []
        pool = TextAcceptance.pooled(self._recent).rates(MAX_SPECULATIVE_TOKENS)
        for text in self._recent:
            # To tell texts from each other takes less than to give one up; the first one is always itself.
            num_deviations = 0.0 if text is self._first else SURPRISE / 2.0
            like = self._losing_rates if self._is_losing(text) else pool
            speedups = self.speedups(text.expected_tokens(limit, like, num_deviations))
            k = max(range(1, len(speedups)), key=speedups.__getitem__)
            self._best_rounds.append((speedups[k], times.round_cost(k)))
            (good if speedups[k] > 1.0 else losing).append(text)
        self.usual = TextAcceptance.pooled(good or self._recent).rates(MAX_SPECULATIVE_TOKENS)
        self._losing_rates, others = [], TextAcceptance.pooled(losing)
        if good and others.num_rounds >= MIN_LOSING_ROUNDS and not others.is_like(self.usual, MIN_DEVIATIONS):
            self._losing_rates, self._log_losing_odds = (
                others.rates(MAX_SPECULATIVE_TOKENS),
                math.log(len(losing) / len(good)),
            )

    def end_late_trial(self, now_ns: int) -> None:
        """End a trial whose time is over, though no window closed: its sessions have left."""
        if self.trial is not None and now_ns > self._trial_end_ns:
            self.trial, self._trial_end_ns = None, now_ns

    def _update_trial(self, now_ns: int) -> None:
        """Begin a trial that is due, end one that is over."""
        times = self.times
        if self.trial is not None:
            measured_ns = times.plain_at_ns if self.trial is Mode.PLAIN else times.round_at_ns
            if measured_ns > self._trial_begin_ns or now_ns > self._trial_end_ns:
                self.trial, self._trial_end_ns = None, now_ns
            return
        pause_ns = TRIAL_PAUSE_TOKENS * times.plain_ns if times.is_certain else 0.0
        if self._debt_ns > 0.0 or not times.is_measured or now_ns - self._trial_end_ns < pause_ns:
            return
        oldest_ns = min(times.plain_at_ns, times.round_at_ns)
        if oldest_ns and now_ns - oldest_ns < pause_ns:
            return
        self.trial = Mode.PLAIN if times.plain_at_ns == oldest_ns else Mode.SPECULATIVE
        self.target.stats.num_trials[self.trial] += 1
        window_ns = max(float(WINDOW_NS), WINDOW_VERDICTS * times.round_cost(0) * times.plain_ns)
        self._trial_begin_ns, self._trial_end_ns = now_ns, now_ns + int(TRIAL_WINDOWS * window_ns)

    def book(self, cycle_ns: int, lost_ns: float) -> None:
        """Account for a session's cycle of ``cycle_ns``, of which a trial lost ``lost_ns``."""
        count, stats = max(self.target.num_sessions, 1), self.target.stats
        stats.busy_s += cycle_ns / count / 1e9
        stats.trial_loss_s += lost_ns / count / 1e9
        self._debt_ns = max(0.0, self._debt_ns + (lost_ns - ALLOWED_LOSS * cycle_ns) / count)


class SessionPace:
    """The pace of one session: as many drafted tokens as bring most tokens per second.

    A draft that proposes trees (which its first proposal shows) is asked for whole ones or none: how much each token of
    a tree adds depends on the others. Acceptance is learned by depth then.
    """

    def __init__(self, drafter: DrafterPacer, limit: int) -> None:
        self.k = 0
        self.speedup = 1.0
        self._limit = limit
        self._drafter = drafter
        self._acceptance = TextAcceptance()
        self._last_ns: int | None = None
        self._is_open = True
        #: ``num_changes`` of the drafter when this session last chose.
        self._num_changes = -1
        drafter.num_sessions += 1
        drafter.target.num_sessions += 1

    def num_draft_tokens(self, num_remaining: int, now_ns: int) -> int:
        """See :class:`~gateway.pacing.pace.Pace`."""
        limit = max(0, min(self._limit, num_remaining - 1))
        if self._last_ns is None:
            self._drafter.end_late_trial(now_ns)
        if self.k or self._num_changes != self._drafter.num_changes:
            self._num_changes, self.speedup = self._drafter.num_changes, 1.0
            self.k = self._choose(limit, num_remaining, now_ns) if limit else 0
        return self.k

    def record(self, verdict: Verdict, num_asked: int, now_ns: int, *, tree_depth: int | None = None) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        drafter, num_tokens, stats = self._drafter, len(verdict.token_ids), self._drafter.target.stats
        if num_asked:
            if self._acceptance.is_empty:
                drafter.add_text(self._acceptance)
            # Near the end of a request trees are low.
            drafter.tree_depth = None if tree_depth is None else max(tree_depth, drafter.tree_depth or 0)
            self._acceptance.observe(num_asked if tree_depth is None else tree_depth, verdict.num_accepted)
        if self._limit:
            stats.num_verdicts[Mode.SPECULATIVE if num_asked else Mode.PLAIN] += 1
            stats.num_draft_tokens += num_asked
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None or not num_tokens:
            return
        drafter.record(now_ns - last_ns, num_tokens, num_asked, now_ns)
        if self._limit:
            drafter.book(now_ns - last_ns, self._trial_loss_ns(num_tokens, num_asked))

    def skip(self, now_ns: int) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        self._last_ns = now_ns

    def leave(self) -> None:
        """See :class:`~gateway.pacing.pace.Pace`."""
        if self._is_open:
            self._is_open = False
            self._drafter.num_sessions -= 1
            self._drafter.target.num_sessions -= 1

    def _choose(self, limit: int, num_remaining: int, now_ns: int) -> int:
        drafter = self._drafter
        if drafter.trial is Mode.PLAIN or not drafter.times.is_measured:
            return 0
        is_tree = drafter.tree_depth is not None  # the draft keeps trees as low as the rest of the request is short
        if drafter.trial is Mode.SPECULATIVE:
            if not self.k:
                self._acceptance = TextAcceptance()  # the text has moved on: its bad beginning counts no more
            return self._limit if is_tree else limit  # fewer tokens would not show long copies
        drafter.compare_texts(self._limit, now_ns)
        speedups = self._speedups(limit)
        best = max(range(1, len(speedups)), key=speedups.__getitem__)
        if speedups[best] <= 1.0 or not (self.k or drafter.starts_with_rounds(num_remaining)):
            return 0
        self.speedup = speedups[best]
        return self._limit if is_tree else best

    def _speedups(self, limit: int) -> list[float]:
        """Speed of rounds with 0, 1, … ``limit`` drafted tokens over plain decoding; of trees only whole ones count."""
        drafter = self._drafter
        if drafter.tree_depth is None:
            return drafter.speedups(drafter.expected_tokens(self._acceptance, limit))
        depth = min(drafter.tree_depth, self._limit)
        whole = drafter.expected_tokens(self._acceptance, depth)[-1]
        return [1.0, whole / drafter.times.round_cost(self._limit)]

    def _trial_loss_ns(self, num_tokens: int, num_asked: int) -> float:
        """What a cycle loses in a trial against the mode that seems faster, at the usual times."""
        if self._drafter.trial is None:
            return 0.0
        times = self._drafter.times
        cost = times.round_cost(num_asked) if num_asked else num_tokens
        return (cost - num_tokens / max(self._speedups(self._limit))) * times.plain_ns
