"""How likely drafted tokens of one text are to be accepted, by their position in the round, learned from its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul
from typing import Final

#: Acceptance rate of a text that was never seen: that of a good draft, so that speculation is tried.
FIRST_GUESS: Final = 0.7
#: Rounds after which evidence counts half: long enough to average rounds that bring 1 or 10 tokens, short enough for
#: texts that change.
HALF_LIFE: Final = 24.0
#: The same for the steps beside all streams of a draft: the few chains of one text tell little of it, for after each
#: wrong token nothing comes for a trip.
STREAM_HALF_LIFE: Final = 500.0
#: Steps that the first guess counts for there, in place of one: the first chain may end at once. With one, steps of
#: 100 ms at a trip of 100 ms decoded plainly throughout.
STREAM_GUESS: Final = 8.0
#: Rounds that what is usual counts for beside those of the text. Texts begin harder than they go on: of four drafted
#: tokens the first rounds of a greedy text accept 1.8, later ones 3, so fewer rounds end good texts too soon.
USUAL_ROUNDS: Final = 16.0
#: No rate is taken for 1.
HIGHEST: Final = 0.99


class TextAcceptance:
    """Acceptance rates by position: of the j-th drafted token, given that those before it were accepted."""

    __slots__ = ("_accepted", "_fade", "_guess", "_tried")

    def __init__(self, half_life: float = HALF_LIFE, guess: float = 1.0) -> None:
        """``guess``: rounds that the first guess counts for."""
        self._guess = guess
        self._fade = 0.5 ** (1.0 / half_life)
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def observe(self, num_tokens: int, num_accepted: int) -> None:
        """A round asked for ``num_tokens`` drafted tokens and ``num_accepted`` of them were accepted.

        Tokens that were asked for but not drafted count as not accepted. Tokens that were drafted but cut off before
        verification say nothing: leave them out of ``num_tokens``.
        """
        last = min(num_accepted + 1, num_tokens)
        missing = [0.0] * (last - len(self._tried))
        self._tried += missing
        self._accepted += missing
        for j, tried in enumerate(self._tried):
            self._tried[j] = tried * self._fade + (j < last)
            self._accepted[j] = self._accepted[j] * self._fade + (j < min(num_accepted, last))

    def own_rates(self, num_tokens: int) -> list[float]:
        """The rate of each of the first ``num_tokens`` positions in this text; unseen ones are like the one before."""
        rates: list[float] = []
        for j in range(num_tokens):
            guess = rates[-1] if rates else FIRST_GUESS
            tried, accepted = (self._tried[j], self._accepted[j]) if j < len(self._tried) else (0.0, 0.0)
            rates.append((accepted + self._guess * guess) / (tried + self._guess))
        return rates

    def rates(self, usual: Sequence[float]) -> list[float]:
        """The rates to expect: the ``usual`` ones, all times how much better this text was than they promised."""
        if not usual:
            return []
        prior = USUAL_ROUNDS * usual[0]
        scale = (sum(self._accepted) + prior) / (sum(map(mul, self._tried, usual)) + prior)
        return [min(HIGHEST, scale * rate) for rate in usual]


def usual_rates(texts: Iterable[TextAcceptance], num_tokens: int) -> list[float]:
    """The mean rates of the better half of these texts: a text counts as a good one until its own rounds say more.

    A bad text costs a few rounds that way; a good one that is taken for a bad one loses all it could gain.
    """
    rates = [text.own_rates(num_tokens) for text in texts]
    rates.sort(key=lambda each: expected_tokens(each)[-1], reverse=True)
    better = rates[: max(1, len(rates) // 2)]
    return [sum(column) / len(better) for column in zip(*better, strict=True)]


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Tokens that a round of 0, 1, … drafted tokens is expected to commit: 1 + the sum of their probabilities to be
    accepted (Leviathan et al. 2023, section 3.1).
    """
    expected, survival = [1.0], 1.0
    for rate in rates:
        survival *= rate
        expected.append(expected[-1] + survival)
    return expected
