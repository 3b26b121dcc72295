"""How likely drafted tokens are to be accepted, by their position in the round, learned from past rounds."""

from __future__ import annotations

from typing import Final

#: Acceptance rate taken for granted where nothing was ever seen, and how many rounds that guess is worth.
FIRST_GUESS: Final = 0.7
FIRST_GUESS_ROUNDS: Final = 2.0
#: Rounds after which evidence counts half: of one session, and the totals over all of them.
SESSION_HALF_LIFE: Final = 24.0
TOTALS_HALF_LIFE: Final = 200.0
#: How many rounds the totals are worth against a session's own.
PRIOR_ROUNDS: Final = 5.0


class Acceptance:
    """Acceptance rates by position: of the j-th drafted token, given that those before it were accepted.

    Counts fade: a round is worth half after ``half_life`` further rounds. Where there are few counts, a prior fills
    in: the same position of ``prior`` (the totals over all sessions) and, from the second position on, this session's
    own position before it.

    A choice made from these numbers depends on past rounds only, never on the tokens it decides about.
    """

    __slots__ = ("_accepted", "_fade", "_prior", "_prior_rounds", "_tried")

    def __init__(self, prior: Acceptance | None = None, *, half_life: float | None = None) -> None:
        """A session's with the totals as ``prior``, the totals without one. ``half_life`` in rounds replaces theirs."""
        self._prior = prior
        self._prior_rounds = FIRST_GUESS_ROUNDS if prior is None else PRIOR_ROUNDS
        self._fade = 0.5 ** (1.0 / (half_life or (TOTALS_HALF_LIFE if prior is None else SESSION_HALF_LIFE)))
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def observe(self, num_tokens: int, num_accepted: int) -> None:
        """A round asked for ``num_tokens`` drafted tokens and ``num_accepted`` of them were accepted.

        Tokens that were asked for but not drafted count as not accepted. Tokens that were drafted but cut off before
        verification say nothing: leave them out of ``num_tokens``.
        """
        tried, accepted, fade = self._tried, self._accepted, self._fade
        for j in range(len(tried)):
            tried[j] *= fade
            accepted[j] *= fade
        last = min(num_accepted + 1, num_tokens)
        while len(tried) < last:
            tried.append(0.0)
            accepted.append(0.0)
        for j in range(last):
            tried[j] += 1.0
        for j in range(min(num_accepted, num_tokens)):
            accepted[j] += 1.0

    def rates(self, num_tokens: int) -> list[float]:
        """The acceptance rate of each of the first ``num_tokens`` positions, given that those before were accepted."""
        prior = self._prior
        guesses = prior.rates(num_tokens) if prior is not None else [FIRST_GUESS] * num_tokens
        weight, tried, accepted = self._prior_rounds, self._tried, self._accepted
        rates: list[float] = []
        for j, guess in enumerate(guesses):
            if j:
                # What was seen one position earlier in this text, and what is usual at this one.
                guess = rates[-1] if prior is None else 0.5 * (guess + rates[-1])  # noqa: PLW2901
            if j < len(tried):
                guess = (accepted[j] + weight * guess) / (tried[j] + weight)  # noqa: PLW2901
            rates.append(guess)
        return rates

    def survival(self, num_tokens: int) -> list[float]:
        """The probability that a round accepts at least 1, 2, … ``num_tokens`` tokens: the products of the rates."""
        survival = 1.0
        result = []
        for rate in self.rates(num_tokens):
            survival *= rate
            result.append(survival)
        return result
