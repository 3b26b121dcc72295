"""What all sessions on one target have in common: costs, acceptance, what may be lost, and the plan made from them."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, Protocol

from gateway.allowance import Allowance
from gateway.cycles import MEASURED, Cycle, Cycles
from gateway.tally import Activity, Tally
from specdec.pacing.acceptance import Acceptance
from specdec.pacing.costs import TickCost
from specdec.pacing.goodput import Choice, Goodput, choose
from specdec.sessions import RoundTimings, Verdict

#: A plan holds for this long, unless the number of sessions changes by more than an eighth.
PLAN_NS: Final = 100_000_000
#: Sessions a plan looks at; more are represented by a sample.
MAX_SAMPLE: Final = 16
#: Speculation begins when it promises so much more than plain decoding, and ends when it promises less than the second.
#: Where it promised less than the third and did not last, it does not begin again for a while.
BEGIN: Final = 1.05
STAY: Final = 1.02
SURE: Final = 1.2
#: One round in so many, of all sessions, drafts a token more than seems best.
CURIOUS_ROUNDS: Final = 64
#: Plain cycles a check of plain decoding and a trial of speculation last. Sessions notice a check after a round, a
#: trial only when they ask for more tokens.
CHECK_CYCLES: Final = 8
TRIAL_CYCLES: Final = 32
#: While speculation pays, what plain decoding takes is measured anew at this age if speculation doubles the speed; for
#: half the gain at half the age, as there is less to lose by looking and more to be wrong about.
CHECK_AGE_NS: Final = 20_000_000_000
#: Pauses between attempts in vain double from the first to the last.
FIRST_TRIAL_PAUSE_NS: Final = 2_000_000_000
LAST_TRIAL_PAUSE_NS: Final = 60_000_000_000
#: The same for probes, in plain cycles; for so many sessions one may probe at a time.
FIRST_PROBE_PAUSE: Final = 256
LAST_PROBE_PAUSE: Final = 1024
PROBE_SHARE: Final = 8
#: Tokens decoded ahead on one request, at least and at most.
MIN_CHUNK: Final = 16
MAX_CHUNK: Final = 64
#: Ticks whose verdicts may still arrive: several sessions report the same tick.
RECENT_TICKS: Final = 8

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


class Lane:
    """What a gateway knows of one target, and the sessions it has open there.

    What speculation brings is learned in three steps, each tried only when the one before is promising: a *probe* (a
    few short rounds of one session) shows how much is accepted; a *trial* (rounds of all sessions for a moment) shows
    how long the cycles are; while speculation is on, a *check* (plain decoding for a moment) shows what it is better
    than. What they lose is paid from the :class:`~gateway.allowance.Allowance`.
    """

    def __init__(self) -> None:
        self.ticks = TickCost()
        self.totals = Acceptance()
        self.plain = Cycles()
        self.speculative = Cycles()
        self.allowance = Allowance()
        self.tally = Tally()
        self.sessions: dict[Member, None] = {}
        #: Sessions whose last verdict was a round's, those that want drafts (theirs may still be opened), and those of
        #: them that probe.
        self.num_in_rounds = self.num_wanting = self.num_probing = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_TICKS)
        self._draft_token_ns = 0.0
        self._context = 0.0
        self._num_foreign = 0.0
        self._choice = _NOTHING
        self._planned_ns: int | None = None
        self._planned_sessions = 0.0
        self._goodput_plain = 0.0
        #: Whether speculation would pay at best, so that a trial may come.
        self._may_pay = True
        #: A trial or a check is under way until then.
        self._trial_until_ns = self._check_until_ns = 0
        self._next_trial_ns = 0
        self._trial_pause_ns = FIRST_TRIAL_PAUSE_NS
        self._next_probe_ns = 0
        self._probe_pause = FIRST_PROBE_PAUSE
        self._num_asked = 0

    # --- what is asked ---

    @property
    def num_sessions(self) -> float:
        """Sessions open on the target: this gateway's, and what its batches show of others'."""
        return len(self.sessions) + self._num_foreign

    def num_draft_tokens(self, survival: list[float], now_ns: int) -> int:
        """Tokens that pay off in the next round of a session with this survival."""
        count = self.num_sessions
        if (
            self._planned_ns is None
            or now_ns - self._planned_ns > PLAN_NS
            or abs(count - self._planned_sessions) > count / 8
        ):
            self._planned_ns, self._planned_sessions = now_ns, count
            self._choice = self._plan(now_ns)
        if self.allowance.overdrawn or now_ns < self._check_until_ns:
            return 0
        k = self._choice.take(survival)
        self._num_asked += k > 0
        return k + (k > 0 and self._num_asked % CURIOUS_ROUNDS == 0)

    def num_ahead(self, now_ns: int) -> int:
        """Tokens a session should decode ahead before it asks again."""
        if now_ns < self._check_until_ns:
            return CHECK_CYCLES // 2
        # A trial is for all sessions; of many one always asks soon enough to probe.
        if self._may_pay:
            soonest_ns = max(self._next_trial_ns, now_ns + PLAN_NS) - now_ns
        elif len(self.sessions) < PROBE_SHARE:
            soonest_ns = self._next_probe_ns - now_ns
        else:
            return MAX_CHUNK
        return min(max(int(soonest_ns / self._plain_cycle_ns()), MIN_CHUNK), MAX_CHUNK)

    def may_probe(self, now_ns: int) -> bool:
        """Whether one more session may probe now."""
        return not self.allowance.overdrawn and self.num_probing < self._most_probing and now_ns >= self._next_probe_ns

    # --- what is observed ---

    def observe_tick(self, timings: RoundTimings) -> None:
        """Learn from the tick a verdict came from; every session of it reports it, once is enough."""
        key = (timings.forward_ns, timings.verify_ns)
        if key in self._recent or not timings.batch_sessions:
            return
        self._recent.append(key)
        sessions = timings.batch_sessions
        self.ticks.observe(timings.batch_rows, sessions, timings.batch_context, float(sum(key)))
        self._context += 0.1 * (timings.batch_context / sessions - self._context)
        self._num_foreign += 0.1 * (max(0, sessions - len(self.sessions)) - self._num_foreign)

    def observe_draft(self, num_tokens: int, draft_ns: int) -> None:
        """Learn what drafting costs."""
        if num_tokens:
            self._draft_token_ns += 0.1 * (draft_ns / num_tokens - self._draft_token_ns)

    def observe_cycle(
        self, verdict: Verdict, cycle_ns: int, num_tokens: int, now_ns: int, *, in_rounds: bool, typical: bool
    ) -> None:
        """A session took ``cycle_ns`` for one round or, not ``in_rounds``, for ``num_tokens`` tokens decoded ahead.

        ``verdict``: the last one of them; not ``typical``: it was the first after a change.
        """
        count, spent_ns = round(self.num_sessions), float(cycle_ns)
        if in_rounds:
            # A few sessions speculating among many that do not miss the ticks of those: that says nothing of all.
            if typical and 2 * self.num_in_rounds >= min(count, self._choice.num_rounds or count):
                k = verdict.num_draft_tokens
                spent_ns = self.speculative.record(count, spent_ns, verdict.timings, k, now_ns)
        elif typical and not self.num_in_rounds:
            each_ns = spent_ns / num_tokens
            spent_ns = num_tokens * self.plain.record(count, each_ns, verdict.timings, 0, now_ns)
        plain_ns = self._plain_cycle_ns()
        lost_ns = 0.0
        if now_ns < self._check_until_ns:
            lost_ns = spent_ns * max(0.0, 1.0 - self._goodput_plain / max(self._choice.goodput, 1e-30))
        elif self.num_wanting or self.num_in_rounds:
            # Speculation slows down sessions that decode plainly, too: they share its ticks, perhaps its machine.
            lost_ns = spent_ns - num_tokens * plain_ns
        self.allowance.book(spent_ns, lost_ns, count, plain_ns)
        self.tally.savings = self.allowance.savings_ns / (plain_ns * max(count, 1))
        activity = self._activity(now_ns)
        self.tally.lost_ns[activity] += lost_ns
        self.tally.spent_ns[activity] += spent_ns

    def begin_probe(self, now_ns: int) -> None:
        """A session looks whether speculation pays for it; the next one may in a while."""
        self.tally.begun[Activity.PROBE] += 1
        self.num_probing += 1
        self._next_probe_ns = now_ns + self._probe_pause_ns()

    def end_probe(self, survival: list[float], now_ns: int) -> None:
        """It has looked; where speculation still does not pay for it the pauses get longer."""
        self.num_probing -= 1
        self._planned_ns = None
        worked = self.num_draft_tokens(survival, now_ns) > 0
        self._probe_pause = FIRST_PROBE_PAUSE if worked else min(2 * self._probe_pause, LAST_PROBE_PAUSE)
        self._next_probe_ns = now_ns + self._probe_pause_ns()

    # --- inside ---

    def _activity(self, now_ns: int) -> Activity:
        if now_ns < self._check_until_ns:
            return Activity.CHECK
        if now_ns < self._trial_until_ns:
            return Activity.TRIAL
        if self._choice.num_tokens:
            return Activity.SPECULATION
        return Activity.PROBE if self.num_wanting or self.num_in_rounds else Activity.PLAIN

    @property
    def _most_probing(self) -> int:
        return max(1, len(self.sessions) // PROBE_SHARE)

    def _probe_pause_ns(self) -> int:
        return int(self._probe_pause * self._plain_cycle_ns() / self._most_probing)

    def _plan(self, now_ns: int) -> Choice:
        """The best of all numbers of drafted tokens, the likeliest first; none unless it beats plain decoding."""
        members = [member for member in self.sessions if member.limit > 0]
        if not members:
            return _NOTHING
        if now_ns < self._check_until_ns:
            return self._choice
        sample = members[:: -(-len(members) // MAX_SAMPLE)]
        survivals = [member.survival for member in sample]
        weight = len(members) / len(sample)
        measured = self._goodput(weight, hopeful=False)
        self._goodput_plain = measured(0, 0, 0.0)
        choice = choose(survivals, measured)
        gain = choice.goodput / self._goodput_plain if choice.num_tokens else 0.0
        may_try = now_ns >= self._next_trial_ns
        if self._choice.num_tokens and gain >= STAY:
            if may_try:
                self._trial_pause_ns = FIRST_TRIAL_PAUSE_NS
            return self._check(choice, now_ns)
        # After an attempt in vain the next one has to be paid for.
        affordable = self.allowance.suffices or self._trial_pause_ns == FIRST_TRIAL_PAUSE_NS
        if gain >= SURE or (gain >= BEGIN and may_try and affordable):
            self._back_off(now_ns)
            return self._check(choice, now_ns)
        hoped = choose(survivals, self._goodput(weight, hopeful=True))
        self._may_pay = hoped.num_tokens > 0 and hoped.goodput >= BEGIN * self._goodput_plain
        is_trial = now_ns < self._trial_until_ns
        if self._may_pay and (is_trial or (may_try and self.allowance.suffices)):
            if not is_trial:
                self._begin_trial(now_ns)
            return hoped
        return _NOTHING

    def _begin_trial(self, now_ns: int) -> None:
        self.tally.begun[Activity.TRIAL] += 1
        self.speculative.refresh()
        self._trial_until_ns = now_ns + int(TRIAL_CYCLES * self._plain_cycle_ns())
        self._back_off(self._trial_until_ns)

    def _back_off(self, from_ns: int) -> None:
        """Speculation begins; if it does not last for this pause the next one is longer."""
        self._next_trial_ns = from_ns + self._trial_pause_ns
        self._trial_pause_ns = min(2 * self._trial_pause_ns, LAST_TRIAL_PAUSE_NS)

    def _check(self, choice: Choice, now_ns: int) -> Choice:
        """``choice``, or nothing for a moment while plain decoding is measured."""
        plain = self.plain.nearest(self.num_sessions)
        if plain is not None and plain.is_measured:
            gain = choice.goodput / self._goodput_plain - 1.0
            if now_ns - plain.updated_ns < gain * CHECK_AGE_NS or not self.allowance.suffices:
                return choice
        else:
            rounds = self.speculative.nearest(self.num_sessions)
            was_looked_for = self._check_until_ns and now_ns - self._check_until_ns < FIRST_TRIAL_PAUSE_NS
            if was_looked_for or rounds is None or rounds.count < MEASURED:
                return choice
        self.tally.begun[Activity.CHECK] += 1
        self.plain.refresh()
        self._check_until_ns = now_ns + int(CHECK_CYCLES * self._plain_cycle_ns())
        return choice

    def _goodput(self, weight: float, *, hopeful: bool) -> Goodput:
        """Tokens per nanosecond of all sessions, by how much is drafted; every counted round stands for ``weight``.

        ``hopeful``: rounds take no longer than the target's work for them, everything else being hidden.
        """
        count = self.num_sessions
        plain, rounds = self.plain.nearest(count), self.speculative.nearest(count)
        plain_rest_ns = plain.rest_ns if plain is not None else 0.0
        plain_ns = self._plain_cycle_ns()

        def goodput(num_tokens: int, num_rounds: int, num_accepted: float) -> float:
            if not num_rounds:
                return count / plain_ns
            k, speculating, hidden = num_tokens / num_rounds, num_rounds * weight, 1.0
            rows = 1.0 + num_tokens * weight / count  # of each session, on average
            if hopeful or rounds is None:
                sessions = count
                cycle_ns = self._tick_ns(rows * sessions, sessions) + plain_rest_ns
                if not hopeful:
                    cycle_ns += k * self._draft_token_ns
            else:
                sessions = max(rounds.sessions * count / rounds.num_sessions, 1.0)
                longer = self._tick_ns(rows * sessions, sessions) / self._tick_ns(rounds.rows, rounds.sessions)
                hidden = self._hidden_share(rounds, plain_rest_ns)
                longer_ns = (k - rounds.num_draft_tokens) * self._draft_token_ns * (1.0 - hidden)
                cycle_ns = rounds.target_ns * longer + rounds.rest_ns + longer_ns
            others = max(0.0, count - speculating)
            others_ns = max(self._tick_ns(rows * sessions, sessions) + plain_rest_ns, plain_ns)
            if others and rounds is not None and not hopeful:
                # Who drafts misses a tick of those that decode plainly.
                cycle_ns = max(cycle_ns, others_ns * (1.0 + (1.0 - hidden) * others / count))
            return (speculating + weight * num_accepted) / max(cycle_ns, 1.0) + others / others_ns

        return goodput

    def _hidden_share(self, rounds: Cycle, plain_rest_ns: float) -> float:
        """Share of the drafting that cycles do not wait for: what they have beyond plain ones shows the other part."""
        drafting_ns = max(rounds.num_draft_tokens * self._draft_token_ns, 1.0)
        return max(0.0, 1.0 - max(0.0, rounds.rest_ns - plain_rest_ns) / drafting_ns)

    def _plain_cycle_ns(self) -> float:
        """What a token takes each session while nobody speculates."""
        count = self.num_sessions
        plain = self.plain.nearest(count)
        if plain is None:
            return self._tick_ns(count, count)
        longer = self._tick_ns(count, count) / self._tick_ns(plain.num_sessions, plain.num_sessions)
        return max(plain.target_ns * longer + plain.rest_ns, 1.0)

    def _tick_ns(self, rows: float, sessions: float) -> float:
        return max(self.ticks.predict(max(rows, 1.0), sessions, sessions * self._context), 1.0)
