"""The verification budget of a step: which drafted tokens are worth their rows, the likeliest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specdec.scheduling.acceptance import Acceptance
from specdec.scheduling.costs import StepCost
from specdec.scheduling.goodput import Choice, Goodput, choose, likeliest
from specdec.types import RoundTimings

#: Nothing is cut before so many steps were seen.
WARM_UP_TICKS: Final = 64
#: Tokens are cut off only if that promises this much more tokens per second.
MARGIN: Final = 1.03
#: Steps in a row decided alike while the number of rounds stays about the same.
STEADY_TICKS: Final = 8
#: While tails are cut, now and then a step verifies more, so that the cost of its rows is known: by 1, 2, 4, … tokens
#: in turn, so many steps apart at least and at most, and rarely enough to cost no more than this share of the time.
MIN_TRIAL_TICKS: Final = 16
MAX_TRIAL_TICKS: Final = 1024
TRIAL_SHARE: Final = 0.01
#: Weight of the newest pause between two steps.
PAUSE_WEIGHT: Final = 0.1


class Budget:
    """Cuts the tails of drafted chains and trees where their rows cost more than the tokens they promise.

    The chance that a token is accepted follows from its position (in a tree its place, see
    :func:`~specdec.scheduling.acceptance.of_tree`) and from past rounds of its session; the cost follows from past
    steps. No token is looked at, and nothing drawn with it. So whether position j is verified is independent of this
    round's tokens: what is verified is a shorter chain or a smaller tree, as if fewer tokens had been asked for. Each
    rule is exact for every length, hence for any mixture of lengths chosen without the chain. (A cut of position j may
    depend on the tokens before j. It must not depend on token j or its probability: tokens of one kind would be
    verified more often than drawn.)
    """

    def __init__(self) -> None:
        self.steps = StepCost()
        self.totals = Acceptance()
        #: Drafted tokens cut off since the start.
        self.num_cut = 0
        self._pause_ns = 0.0
        self._choice: Choice | None = None
        self._decided_for = 0
        self._steady = 0
        self._until_trial = MIN_TRIAL_TICKS
        self._trial_tokens = 1

    def observe(self, timings: RoundTimings, pause_ns: int) -> None:
        """A step ran, ``pause_ns`` after the one before; a pause with no session open says nothing: leave it out."""
        spent_ns = timings.forward_ns + timings.verify_ns
        self.steps.observe(timings.batch_rows, timings.batch_sessions, timings.batch_context, spent_ns)
        self._pause_ns += PAUSE_WEIGHT * (min(pause_ns, spent_ns) - self._pause_ns)

    def allot(self, survivals: Sequence[Sequence[float]], context: int) -> list[int]:
        """Drafted tokens to verify of each round of a step.

        ``survivals``: for each round the probability that 1, 2, … of its drafted tokens are accepted, none where it has
        none; ``context``: cache entries of all of them.
        """
        wanted = [len(survival) for survival in survivals]
        total = sum(wanted)
        if not total or self.steps.num_steps < WARM_UP_TICKS:
            return wanted
        goodput = self._goodput(len(survivals), context)
        choice = self._choose(survivals, goodput)
        counts = wanted if choice is None else [choice.take(survival) for survival in survivals]
        if sum(counts) < total:
            counts = self._try(survivals, counts, goodput)
        self.num_cut += total - sum(counts)
        return counts

    def _goodput(self, num_rounds: int, context: int) -> Goodput:
        """Tokens per nanosecond of a step, by how many drafted tokens it verifies; see :func:`choose`."""

        def goodput(num_tokens: int, _: int, num_accepted: float) -> float:
            step_ns = self.steps.predict(num_rounds + num_tokens, num_rounds, context)
            return (num_rounds + num_accepted) / max(step_ns + self._pause_ns, 1.0)

        return goodput

    def _choose(self, survivals: Sequence[Sequence[float]], goodput: Goodput) -> Choice | None:
        """What to keep; None keeps all."""
        num_rounds = len(survivals)
        if self._steady > 0 and abs(num_rounds - self._decided_for) <= num_rounds // 8:
            self._steady -= 1
            return self._choice
        self._choice, self._decided_for, self._steady = None, num_rounds, STEADY_TICKS
        best = choose(survivals, goodput)
        if best.goodput > MARGIN * goodput(*_count(survivals)):
            self._choice = best
        return self._choice

    def _try(self, survivals: Sequence[Sequence[float]], counts: list[int], goodput: Goodput) -> list[int]:
        """``counts``, or now and then a few tokens more."""
        self._until_trial -= 1
        if self._until_trial > 0:
            return counts
        kept = [survival[:count] for survival, count in zip(survivals, counts, strict=True)]
        more = likeliest(survivals, sum(counts) + self._trial_tokens)
        tried = [survival[:count] for survival, count in zip(survivals, more, strict=True)]
        loss = goodput(*_count(kept)) / goodput(*_count(tried)) - 1.0
        self._until_trial = min(max(int(loss / TRIAL_SHARE), MIN_TRIAL_TICKS), MAX_TRIAL_TICKS)
        self._trial_tokens = 1 if sum(more) == sum(map(len, survivals)) else 2 * self._trial_tokens
        return more


def _count(chains: Sequence[Sequence[float]]) -> tuple[int, int, float]:
    """Tokens, chains with any, and tokens expected to be accepted."""
    return sum(map(len, chains)), sum(map(bool, chains)), sum(map(sum, chains))
