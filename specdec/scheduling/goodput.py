"""The choice that brings most tokens per second: which drafted tokens of which rounds are worth their rows.

Expected tokens of a round are 1 + Σ survival of its drafted tokens (Leviathan et al. 2023, section 3.1, for a rate
that does not depend on the position). Choosing lengths by expected tokens per second of the whole batch is the
"goodput" of Liu et al. 2024 (SmartSpec, TurboSpec; arXiv 2406.14066).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

#: Tokens per nanosecond when ``(num_tokens, num_rounds, num_accepted)`` are drafted, from so many different rounds, and
#: expected to be accepted; (0, 0, 0) stands for none.
Goodput = Callable[[int, int, float], float]

#: Up to so many tokens every number of them is tried; beyond, steps of about 6 %.
EXACT_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Choice:
    """How far to go down the list of drafted tokens, the likeliest first."""

    #: Tokens with a survival of at least this are chosen; infinite where none is.
    threshold: float
    num_tokens: int
    #: Rounds with at least one chosen token.
    num_rounds: int
    #: Of the chosen tokens, expected to be accepted.
    num_accepted: float
    #: Tokens per nanosecond.
    goodput: float

    def take(self, survival: Sequence[float]) -> int:
        """How many of a round's tokens are chosen."""
        for count, value in enumerate(survival):
            if value < self.threshold:
                return count
        return len(survival)


def choose(rounds: Sequence[Sequence[float]], goodput: Goodput) -> Choice:
    """The best number of drafted tokens over all rounds.

    ``rounds``: for each the survival of its tokens, non-increasing.

    For every number of rows the likeliest tokens are the best ones, so one pass down the sorted list finds the best
    choice whatever the shape of the cost; a token's predecessors in its round come before it by themselves.
    """
    tokens = sorted(
        ((value, position == 0) for survival in rounds for position, value in enumerate(survival)),
        key=lambda token: (-token[0], not token[1]),
    )
    best = Choice(float("inf"), 0, 0, 0.0, goodput(0, 0, 0.0))
    accepted, num_rounds, next_try = 0.0, 0, 1
    for count, (value, first) in enumerate(tokens, 1):
        accepted += value
        num_rounds += first
        following = tokens[count][0] if count < len(tokens) else 0.0
        if following == value or (count < next_try and following):
            continue  # no threshold parts equal values, such as those of one tree
        next_try = count + 1 if count < EXACT_TOKENS else count + 1 + count // 16
        reached = goodput(count, num_rounds, accepted)
        if reached > best.goodput:
            # Between this token and the next, so that small changes of the estimates do not change the choice.
            threshold = (value * following) ** 0.5 if following else 0.5 * value
            best = Choice(threshold, count, num_rounds, accepted, reached)
    return best


def likeliest(rounds: Sequence[Sequence[float]], num_tokens: int) -> list[int]:
    """How many tokens of each round are among the ``num_tokens`` likeliest of all; of equal ones the earlier."""
    order = sorted(
        (-value, position, index) for index, survival in enumerate(rounds) for position, value in enumerate(survival)
    )
    counts = [0] * len(rounds)
    for _, _, index in order[:num_tokens]:
        counts[index] += 1
    return counts
