"""How likely drafted tokens of one text are to be accepted, by their position in the round, learned from its rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Self

#: Acceptance rate of a text that was never seen: that of a good draft, so that speculation is tried.
FIRST_GUESS: Final = 0.7
#: Rounds after which evidence counts half: long enough to average rounds that bring 1 or 10 tokens, short enough for
#: texts that change.
HALF_LIFE: Final = 24.0
#: Rounds of one text that count at most where texts are pooled: a long bad text weighs no more than a short one.
POOLED_ROUNDS: Final = 8.0
#: A text is taken for a usual one until its rounds are so many standard deviations away from that: seven rounds without
#: an accepted token where most are accepted, or one long copy where few are. Rounds of a text are alike, so fewer
#: deviations would take a few bad rounds of a good text for a bad one.
SURPRISE: Final = 4.0

#: Rates that were learned are never taken for 0 or 1.
RARE: Final = 0.001


class TextAcceptance:
    """Acceptance rates by position: of the j-th drafted token, given that those before it were accepted."""

    __slots__ = ("_accepted", "_tried", "_weight")

    def __init__(self) -> None:
        self._weight = POOLED_ROUNDS
        self._tried: list[float] = []
        self._accepted: list[float] = []

    @classmethod
    def first(cls, num_tokens: int) -> Self:
        """A text that was never seen; it is worth two others, so that one bad text does not end the optimism."""
        text = cls()
        text._weight = 2.0 * POOLED_ROUNDS
        text._tried = [text._weight * FIRST_GUESS**j for j in range(num_tokens)]
        text._accepted = [FIRST_GUESS * tried for tried in text._tried]
        return text

    @classmethod
    def pooled(cls, texts: Iterable[TextAcceptance]) -> Self:
        """What is usual in these texts; none outweighs the others."""
        pool = cls()
        for text in texts:
            share = min(1.0, text._weight / text._tried[0])
            pool._extend(len(text._tried))
            for j, tried in enumerate(text._tried):
                pool._tried[j] += share * tried
                pool._accepted[j] += share * text._accepted[j]
        return pool

    @property
    def num_rounds(self) -> float:
        """Rounds seen, older ones for less than one."""
        return self._tried[0] if self._tried else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no round was seen."""
        return not self.num_rounds

    def observe(self, num_tokens: int, num_accepted: int) -> None:
        """A round asked for ``num_tokens`` drafted tokens and ``num_accepted`` of them were accepted.

        Tokens that were asked for but not drafted count as not accepted. Tokens that were drafted but cut off before
        verification say nothing: leave them out of ``num_tokens``.
        """
        fade = 0.5 ** (1.0 / HALF_LIFE)
        last = min(num_accepted + 1, num_tokens)
        self._extend(last)
        for j, tried in enumerate(self._tried):
            self._tried[j] = tried * fade + (j < last)
            self._accepted[j] = self._accepted[j] * fade + (j < min(num_accepted, last))

    def rates(self, num_tokens: int) -> list[float]:
        """The acceptance rate of each of the first ``num_tokens`` positions; unseen ones are like the last one seen."""
        rates: list[float] = []
        for j in range(num_tokens):
            guess = rates[-1] if rates else FIRST_GUESS
            tried, accepted = (self._tried[j], self._accepted[j]) if j < len(self._tried) else (0.0, 0.0)
            rates.append((accepted + guess) / (tried + 1.0))
        return rates

    def is_like(self, usual: Sequence[float], num_deviations: float = SURPRISE) -> bool:
        """Whether this text's rounds may be those of one with the ``usual`` rates."""
        excess = variance = 0.0
        for tried, accepted, rate in zip(self._tried, self._accepted, usual, strict=False):
            excess += accepted - tried * rate
            variance += tried * rate * (1.0 - rate)
        return excess * excess < num_deviations**2 * variance or not self._tried

    def log_likelihood(self, rates: Sequence[float]) -> float:
        """Logarithm of the probability of this text's rounds in one with these ``rates``."""
        result = 0.0
        for tried, accepted, rate in zip(self._tried, self._accepted, rates, strict=False):
            bounded = min(max(rate, RARE), 1.0 - RARE)
            result += accepted * math.log(bounded) + (tried - accepted) * math.log(1.0 - bounded)
        return result

    def expected_tokens(self, num_tokens: int, usual: Sequence[float], num_deviations: float = SURPRISE) -> list[float]:
        """Tokens that a round of 0, 1, … ``num_tokens`` drafted tokens is expected to commit: 1 + the sum of their
        probabilities to be accepted (Leviathan et al. 2023, section 3.1).
        """
        expected, survival = [1.0], 1.0
        for rate in usual[:num_tokens] if self.is_like(usual, num_deviations) else self.rates(num_tokens):
            survival *= rate
            expected.append(expected[-1] + survival)
        return expected

    def _extend(self, length: int) -> None:
        self._tried += [0.0] * (length - len(self._tried))
        self._accepted += [0.0] * (length - len(self._accepted))
