"""What rounds are expected to bring: tokens per second of all sessions on a target, by how much is drafted."""

from __future__ import annotations

from collections import deque
from typing import Final

from gateway.pacing.cycles import Cycles
from specdec.scheduling.costs import StepCost
from specdec.scheduling.goodput import Goodput
from specdec.types import RoundTimings

#: Steps whose verdicts may still arrive: several sessions report the same step.
RECENT_TICKS: Final = 8
#: Weight of the newest observation of a drafted token's time and of the context.
NEWEST: Final = 0.1


class Forecast:
    """A model of one target's steps, its sessions' cycles and their drafts, learned from verdicts."""

    def __init__(self) -> None:
        self.steps = StepCost()
        self.plain = Cycles()
        self.speculative = Cycles()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_TICKS)
        self._draft_token_ns = 0.0
        self._context = 0.0

    def observe_step(self, timings: RoundTimings) -> bool:
        """Learn from the step a verdict came from; every session of it reports it: whether this was the first."""
        key = (timings.forward_ns, timings.verify_ns)
        if key in self._recent or not timings.batch_sessions:
            return False
        self._recent.append(key)
        sessions = timings.batch_sessions
        self.steps.observe(timings.batch_rows, sessions, timings.batch_context, float(sum(key)))
        self._context += NEWEST * (timings.batch_context / sessions - self._context)
        return True

    def observe_draft(self, num_tokens: int, draft_ns: int) -> None:
        """Learn what drafting costs."""
        if num_tokens:
            self._draft_token_ns += NEWEST * (draft_ns / num_tokens - self._draft_token_ns)

    def plain_cycle_ns(self, num_sessions: float) -> float:
        """What a token takes each of ``num_sessions`` while nobody speculates."""
        plain = self.plain.nearest(num_sessions)
        if plain is None:
            return self._step_ns(num_sessions, num_sessions)
        longer = self._step_ns(num_sessions, num_sessions) / self._step_ns(plain.num_sessions, plain.num_sessions)
        return max(plain.target_ns * longer + plain.rest_ns, 1.0)

    def goodput(self, num_sessions: float, weight: float, *, hopeful: bool = False) -> Goodput:
        """Tokens per nanosecond of ``num_sessions``, by how much is drafted; every counted round stands for ``weight``.

        ``hopeful``: rounds take no longer than the target's work for them, everything else being hidden.
        """
        plain, plain_ns = self.plain.nearest(num_sessions), self.plain_cycle_ns(num_sessions)
        rest_ns = plain.rest_ns if plain is not None else 0.0
        fixed_ns, token_ns = (0.0, 0.0) if hopeful else self._drafting_ns(num_sessions, rest_ns)

        def goodput(num_tokens: int, num_rounds: int, num_accepted: float) -> float:
            if not num_rounds:
                return num_sessions / plain_ns
            speculating = num_rounds * weight
            others = max(0.0, num_sessions - speculating)
            # One step carries all: those that decode plainly wait for the rows of the others.
            others_ns = self._step_ns(num_sessions + num_tokens * weight, num_sessions) + rest_ns
            cycle_ns = others_ns + fixed_ns + token_ns * num_tokens / num_rounds
            return (speculating + weight * num_accepted) / cycle_ns + others / max(others_ns, plain_ns)

        return goodput

    def _drafting_ns(self, num_sessions: float, plain_rest_ns: float) -> tuple[float, float]:
        """What a round waits for besides its step and what multi-step tokens wait for, too: for anything, and for
        each drafted token.
        """
        rounds, token_ns = self.speculative.nearest(num_sessions), self._draft_token_ns
        if rounds is None or not rounds.num_draft_tokens:
            return 0.0, token_ns
        waited_ns = max(0.0, rounds.rest_ns - plain_rest_ns)
        drafted_ns = rounds.num_draft_tokens * token_ns
        if waited_ns < drafted_ns:  # some of the drafting is hidden
            return 0.0, waited_ns / rounds.num_draft_tokens
        return waited_ns - drafted_ns, token_ns

    def _step_ns(self, rows: float, sessions: float) -> float:
        return max(self.steps.predict(max(rows, 1.0), sessions, sessions * self._context), 1.0)
