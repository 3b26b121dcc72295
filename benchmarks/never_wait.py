"""The speed that a draft at a distance allows, simulated: of a target that never waits, and of one that does."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

NUM_TOKENS: Final = 20_000


def stream_speed(runs: Sequence[int], rtt: float, k: int, draft_rate: float, jitter: float = 0.0) -> float:
    """Speed over plain decoding without waiting. Times are steps; a step takes 1 with drafted tokens, too.

    ``runs``: measured numbers of drafted tokens that were right before one was wrong; they are drawn anew. The draft
    writes a chain, ``draft_rate`` tokens a step, and begins another one when it hears of a wrong token, half a round
    trip after the step. A step verifies what has arrived when it begins, ``k`` tokens at most, and commits one more
    than are right. ``jitter``: of each trip, relatively.
    """
    rng = random.Random(0)
    now, length, begun = 0.0, 0, 0.0
    arrivals: list[float] = []  # of the tokens of the current run, and last of the wrong one
    while length < NUM_TOKENS:
        if not arrivals:  # it begins anew where a wrong token was committed
            first = begun + rtt * (1.0 + jitter * (rng.random() - rng.random()))
            arrivals = [first + i / draft_rate for i in range(1, rng.choice(runs) + 2)]
        num_right = sum(at <= now for at in arrivals[: min(k, len(arrivals) - 1)])
        now, length = now + 1.0, length + num_right + 1
        del arrivals[: num_right + 1]
        begun = now
    return length / now


def round_speed(runs: Sequence[int], rtt: float, k: int, draft_rate: float) -> float:
    """The same with a wait for ``k`` tokens in each step."""
    num_rounds = sum(math.ceil((run + 1) / (k + 1)) for run in runs)
    return sum(run + 1 for run in runs) / (num_rounds * (1.0 + rtt + k / draft_rate))
