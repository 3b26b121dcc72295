"""Acceptance statistics: how often drafts were accepted, and which guess the target's own token was.

They follow from the committed tokens alone. They decide what is drafted ahead, never what is drafted, so they cannot
change a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Guesses of the target's token that are looked at, per position.
NUM_GUESSES: Final = 4
#: Share of its weight an observation keeps when the next one comes: short for a session, long for the service.
SESSION_MEMORY: Final = 0.97
SERVICE_MEMORY: Final = 0.999
#: How many observations the service's rate counts for in a session's, and a first assumption in the service's.
PRIOR_WEIGHT: Final = 4.0
#: Acceptance of a drafted token before anything was observed.
FIRST_ACCEPTANCE: Final = 0.6
#: Share of the target's tokens that each guess is before anything was observed: after a rejection, where the rejected
#: token itself is no guess, and after a whole proposal was accepted.
FIRST_AFTER_REJECTION: Final = (0.4, 0.12, 0.05)
FIRST_AFTER_ALL: Final = (0.6, 0.12, 0.05, 0.03)


class Rate:
    """How often something happens; old observations fade."""

    __slots__ = ("_hits", "_memory", "_trials")

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._hits = 0.0
        self._trials = 0.0

    def count(self, is_hit: bool) -> None:
        """Add one observation."""
        self._hits = self._memory * self._hits + is_hit
        self._trials = self._memory * self._trials + 1.0

    def estimate(self, prior: float) -> float:
        """The posterior mean, where ``prior`` counts for ``PRIOR_WEIGHT`` observations."""
        return (self._hits + PRIOR_WEIGHT * prior) / (self._trials + PRIOR_WEIGHT)


class AcceptanceStats:
    """The rates of one kind of session, over all of the service."""

    def __init__(self) -> None:
        #: Acceptance of the first, second, … drafted token, given that those before were accepted.
        self.accepted: list[Rate] = []
        self.after_rejection = GuessStats(FIRST_AFTER_REJECTION)
        self.after_all = GuessStats(FIRST_AFTER_ALL)

    def acceptance(self, at: int) -> float:
        """Probability that the drafted token ``at`` (from 0) is accepted, given those before it."""
        if at < len(self.accepted):
            return self.accepted[at].estimate(FIRST_ACCEPTANCE)
        return FIRST_ACCEPTANCE


class GuessStats:
    """How often the target's token is the first, second, … guess of it."""

    def __init__(self, first: Sequence[float]) -> None:
        self._first = first
        self._rates = [Rate(SERVICE_MEMORY) for _ in first]
        #: Probability of each guess, best guess first.
        self.probabilities = list(first)

    def count(self, token_id: int, guesses: Sequence[int]) -> None:
        """The target's token was this one."""
        for rank, (rate, guess) in enumerate(zip(self._rates, guesses, strict=False)):
            rate.count(guess == token_id)
            self.probabilities[rank] = rate.estimate(self._first[rank])


class SessionStats:
    """The statistics of one session: its own acceptance rates, and the guesses of all sessions of its kind."""

    def __init__(self, service: AcceptanceStats) -> None:
        self._service = service
        self._accepted: list[Rate] = []

    @property
    def after_rejection(self) -> GuessStats:
        """Guesses of the token that takes the place of a rejected one, which is not among them."""
        return self._service.after_rejection

    @property
    def after_all(self) -> GuessStats:
        """Guesses of the token after an accepted proposal."""
        return self._service.after_all

    def acceptance(self, at: int) -> float:
        """Probability that the drafted token ``at`` (from 0) is accepted, given those before it."""
        prior = self._service.acceptance(at)
        return self._accepted[at].estimate(prior) if at < len(self._accepted) else prior

    def count(self, num_accepted: int, num_judged: int) -> None:
        """Of the first ``num_judged`` drafted tokens of a proposal, these many were accepted, then none or one not."""
        for rates, memory in ((self._accepted, SESSION_MEMORY), (self._service.accepted, SERVICE_MEMORY)):
            while len(rates) < num_judged:
                rates.append(Rate(memory))
            for at in range(num_judged):
                rates[at].count(at < num_accepted)
