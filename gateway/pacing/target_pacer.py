"""What a gateway knows of one target, and the sessions it has open there: who drafts how much, and who probes."""

from __future__ import annotations

import math
from typing import Final, Protocol

from gateway.pacing.comparison import ModeComparison, Phase
from gateway.pacing.estimate import Forecast
from gateway.pacing.exploration_budget import ExplorationBudget
from gateway.pacing.mode_stats import MIN_UNIT_NS
from gateway.pacing.stats import Activity, PacingStats
from specdec.scheduling.acceptance import Acceptance
from specdec.scheduling.goodput import Choice, choose
from specdec.types import RoundTimings, Verdict

#: A plan holds for this long, unless the number of sessions changes by more than an eighth.
PLAN_NS: Final = 100_000_000
#: Sessions a plan looks at; more are represented by a sample.
MAX_SAMPLE: Final = 16
#: Speculation is worth a try if it would be so much faster should all but the target's work be hidden, and no longer if
#: it would be less than the second.
BEGIN: Final = 1.1
STAY: Final = 1.05
#: One round in so many, of all sessions, drafts a token more than seems best.
CURIOUS_ROUNDS: Final = 64
#: Pauses between probes in vain double from the first to the last, in plain cycles; for so many sessions one may probe
#: at a time.
FIRST_PROBE_PAUSE: Final = 256
LAST_PROBE_PAUSE: Final = 1024
PROBE_SHARE: Final = 8
#: Tokens decoded in multi-step on one request, at least and at most.
MIN_CHUNK: Final = 16
MAX_CHUNK: Final = 64

_NOTHING: Final = Choice(math.inf, 0, 0, 0.0, 0.0)


class Member(Protocol):
    """What a plan needs of a session."""

    @property
    def limit(self) -> int:
        """Drafted tokens a round at most."""
        ...

    @property
    def survival(self) -> list[float]:
        """The probability that a round accepts at least 1, 2, … ``limit`` drafted tokens."""
        ...


class TargetPacer:
    """The sessions on one target, and what they have in common.

    A :class:`~gateway.pacing.comparison.ModeComparison` decides by measurement whether they draft, the
    :class:`~gateway.pacing.estimate.Forecast` how much. Where even that promises nothing, a *probe* (a few short rounds
    of one session) shows now and then whether the draft has become any better.
    """

    def __init__(self) -> None:
        self.forecast = Forecast()
        self.totals = Acceptance()
        self.contest = ModeComparison()
        self.allowance = ExplorationBudget()
        self.tally = PacingStats()
        self.sessions: dict[Member, None] = {}
        #: Tokens on the longest path of the latest tree that was verified; None where a chain was.
        self.tree_depth: int | None = None
        #: Sessions that may draft, those whose last verdict was a round's, and those that probe.
        self.num_members = self.num_in_rounds = self.num_probing = 0
        self._num_foreign = 0.0
        self._choice = _NOTHING
        #: What a token takes each session without speculation, by the plan in force; 0 before the first step.
        self._plain_ns = 0.0
        self._planned_ns: int | None = None
        self._planned_sessions = 0.0
        self._planned_turn = 0
        self._next_probe_ns = 0
        self._probe_pause = FIRST_PROBE_PAUSE
        self._num_asked = 0

    # --- what is asked ---

    @property
    def num_sessions(self) -> float:
        """Sessions open on the target: this gateway's, and what its batches show of others'."""
        return len(self.sessions) + self._num_foreign

    def num_draft_tokens(self, survival: list[float], now_ns: int) -> int:
        """Tokens to draft in the next round of a session with this survival."""
        self._plan(now_ns)
        if not self.contest.speculates:
            return 0
        k = self._choice.take(survival)
        self._num_asked += k > 0
        return k + (k > 0 and self._num_asked % CURIOUS_ROUNDS == 0)

    def num_multi_step_tokens(self, now_ns: int) -> int:
        """Tokens a session should decode in multi-step before it asks again."""
        plain_ns, unit_ns = max(self._plain_ns, 1.0), self._unit_ns
        if self.contest.phase is not Phase.LEADING:
            return min(max(int(self.contest.turn_length * unit_ns / plain_ns), 1), MAX_CHUNK)
        # The next turn is all sessions'; of many one always asks soon enough to probe.
        if self._choice.num_tokens:
            soonest_ns = self.contest.waiting(self.allowance.savings) * unit_ns
        elif len(self.sessions) < PROBE_SHARE:
            soonest_ns = self._next_probe_ns - now_ns
        else:
            return MAX_CHUNK
        return min(max(int(soonest_ns / plain_ns), MIN_CHUNK), MAX_CHUNK)

    def may_probe(self, now_ns: int) -> bool:
        """Whether one more session may probe now."""
        contest = self.contest
        # Where only the contest speaks against drafting, how much is accepted is not the question.
        is_question = contest.phase is Phase.LEADING and (contest.speculates or not self._choice.num_tokens)
        return (
            is_question
            and self.allowance.savings > 0.0
            and self.num_probing < self._most_probing
            and now_ns >= self._next_probe_ns
        )

    # --- what is observed ---

    def observe_step(self, timings: RoundTimings) -> None:
        """Learn from the step a verdict came from; every session of it may report it."""
        if self.forecast.observe_step(timings):
            self._num_foreign += 0.1 * (max(0, timings.batch_sessions - len(self.sessions)) - self._num_foreign)
            if not self._plain_ns:
                self._plain_ns = self.forecast.plain_cycle_ns(self.num_sessions)

    def observe_cycle(self, verdict: Verdict, cycle_ns: int, num_tokens: int, *, in_rounds: bool) -> None:
        """A typical cycle of a session: ``cycle_ns`` for one round or, not ``in_rounds``, for ``num_tokens`` tokens
        decoded in multi-step; ``verdict`` is the last one of them.
        """
        count, forecast = round(self.num_sessions), self.forecast
        if in_rounds:
            # A few sessions speculating among many that do not miss the steps of those: that says nothing of all.
            if 2 * self.num_in_rounds >= min(count, self._choice.num_rounds or count):
                forecast.speculative.record(count, float(cycle_ns), verdict.timings, verdict.num_draft_tokens)
        elif not self.num_in_rounds:
            forecast.plain.record(count, cycle_ns / num_tokens, verdict.timings, 0)

    def settle(self, cycle_ns: int, num_tokens: int, *, counts: bool) -> None:
        """A session that may draft took ``cycle_ns`` for ``num_tokens``, typical or not; ``counts``: it decodes as the
        contest's turn wants it.
        """
        activity, unit_ns, members = self._activity(), self._unit_ns, max(self.num_members, 1)
        self.contest.follow_load(self.num_sessions)
        lost = self.contest.record(members, num_tokens, float(cycle_ns), unit_ns, counts=counts)
        if activity is Activity.PROBE:
            # A probe slows down the sessions that decode plainly, too: they share its steps, perhaps its machine.
            lost = (cycle_ns - num_tokens * self._plain_ns) / (unit_ns * members)
        self.allowance.book(cycle_ns / (unit_ns * members), lost)
        self.tally.savings = self.allowance.savings
        self.tally.spent_ns[activity] += cycle_ns
        self.tally.lost_ns[activity] += lost * unit_ns * members

    def begin_probe(self, now_ns: int) -> None:
        """A session looks whether speculation pays for it; the next one may in a while."""
        self.tally.begun[Activity.PROBE] += 1
        self.num_probing += 1
        self._next_probe_ns = now_ns + self._probe_pause_ns()

    def end_probe(self, survival: list[float], now_ns: int) -> None:
        """It has looked; where speculation still does not pay for it the pauses get longer."""
        self.num_probing -= 1
        self._planned_ns = None
        self._plan(now_ns)
        worked = self._choice.take(survival) > 0
        self._probe_pause = FIRST_PROBE_PAUSE if worked else min(2 * self._probe_pause, LAST_PROBE_PAUSE)
        self._next_probe_ns = now_ns + self._probe_pause_ns()

    # --- inside ---

    @property
    def _unit_ns(self) -> float:
        """The contest's and the account's unit of time."""
        return max(self._plain_ns, MIN_UNIT_NS)

    @property
    def _most_probing(self) -> int:
        return max(1, len(self.sessions) // PROBE_SHARE)

    def _probe_pause_ns(self) -> int:
        return int(self._probe_pause * self._plain_ns / self._most_probing)

    def _plan(self, now_ns: int) -> None:
        """Decide anew, if it is time for it, whether sessions draft and which of their tokens are worth it."""
        count, contest = self.num_sessions, self.contest
        if (
            self._planned_ns is not None
            and now_ns - self._planned_ns <= PLAN_NS
            and abs(count - self._planned_sessions) <= count / 8
            and contest.turn == self._planned_turn
        ):
            return
        if self._plain_ns:
            self._plain_ns = self.forecast.plain_cycle_ns(count)
        self._choice = self._choose()
        contest.allow(self._choice.num_tokens > 0)
        if contest.consider(self.allowance.savings):
            self.tally.begun[self._activity()] += 1
        self._planned_ns, self._planned_sessions, self._planned_turn = now_ns, count, contest.turn

    def _choose(self) -> Choice:
        """The best of all numbers of drafted tokens, the likeliest first; none where speculation cannot pay."""
        members = [member for member in self.sessions if member.limit > 0]
        if not members:
            return _NOTHING
        sample = members[:: -(-len(members) // MAX_SAMPLE)]
        survivals = [member.survival for member in sample]
        count, weight = self.num_sessions, len(members) / len(sample)
        hopeful = self.forecast.goodput(count, weight, hopeful=True)
        hoped = choose(survivals, hopeful)
        if hoped.goodput < (STAY if self._choice.num_tokens else BEGIN) * hopeful(0, 0, 0.0) or not hoped.num_tokens:
            return _NOTHING
        measured = self.forecast.goodput(count, weight)
        # Whether to draft at all is not the forecast's to say.
        return choose(survivals, lambda tokens, rounds, accepted: tokens and measured(tokens, rounds, accepted))

    def _activity(self) -> Activity:
        contest = self.contest
        if contest.phase is not Phase.LEADING:
            return Activity.TRIAL if contest.speculates is (contest.phase is Phase.TURN) else Activity.CHECK
        if contest.speculates:
            return Activity.SPECULATION
        return Activity.PROBE if self.num_probing else Activity.PLAIN
