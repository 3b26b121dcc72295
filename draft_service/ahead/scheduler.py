"""Which hypotheses of which sessions are drafted for next, while no session waits for a draft."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, Final, Protocol

from draft_service.ahead.verdict_tree import Hypothesis, VerdictTree
from draft_service.batcher import DraftRequest, InflightBatch

#: Rows of a batch drafted ahead, at most, and how long it may take where that leaves room for more than one row.
MAX_ROWS: Final = 8
BATCH_NS: Final = 2_000_000
#: Time over which the share of fresh work is measured.
WINDOW_NS: Final = 100_000_000


class Guessing(Protocol):
    """A session with hypotheses."""

    @property
    def tree(self) -> VerdictTree:
        """Its hypotheses."""
        ...

    def draft_for(self, hypothesis: Hypothesis) -> DraftRequest[Any]:
        """Begin to draft for one of them."""
        ...


@dataclass(slots=True)
class AheadCounts:
    """What drafting ahead has done since the start."""

    #: Proposals drafted ahead and sent, and those of them whose assumption came true.
    num_proposals: int = 0
    num_hits: int = 0
    #: Tokens drafted ahead, and those of proposals whose assumption came true.
    num_tokens: int = 0
    num_hit_tokens: int = 0
    #: Chains ended early because a verdict or a waiting session left no use for them.
    num_stopped: int = 0
    #: Nanoseconds of batches drafted ahead.
    busy_ns: int = 0

    @property
    def num_wasted_tokens(self) -> int:
        """Tokens drafted ahead for nothing (or for what is not decided yet)."""
        return self.num_tokens - self.num_hit_tokens


class AheadScheduler:
    """Plans the batches that are drafted ahead; the batcher's work while no wish waits.

    The likeliest hypotheses come first, whoever's they are. A batch is small, so that a wish that arrives meanwhile
    does not wait long for its end. A hypothesis must be at least as likely to be of use as the device is to be wanted
    for a wish: the share of time that wishes take.
    """

    def __init__(self) -> None:
        self.counts = AheadCounts()
        self._sessions: dict[Guessing, None] = {}
        self._pace = Pace()
        self._load = Load()

    def add(self, session: Guessing) -> None:
        """The session has hypotheses to draft for."""
        self._sessions[session] = None

    def discard(self, session: Guessing) -> None:
        """It has none, or is closed."""
        self._sessions.pop(session, None)

    def take(self) -> list[DraftRequest[Any]]:
        """The next batch: the likeliest hypotheses that are worth it."""
        if not self._sessions:
            return []
        best = nlargest(self._pace.max_rows(), self._worthwhile(self._load.share()), key=_likelihood)
        return [session.draft_for(hypothesis) for session, hypothesis in best]

    def landed(self, flight: InflightBatch, num_steps: int, spent_ns: int) -> None:
        """Learn from a batch of any work how busy the device is and how long a step takes."""
        if not flight.is_ahead:
            self._load.add_busy(spent_ns)
            return
        self.counts.busy_ns += spent_ns
        if num_steps:  # also of a batch that was stopped: else one that always is would never get smaller
            self._pace.count(len(flight.wishes), num_steps, spent_ns)

    def _worthwhile(self, floor: float) -> Iterator[tuple[Guessing, Hypothesis]]:
        for session in tuple(self._sessions):
            tree = session.tree
            worthwhile = [hypothesis for hypothesis in tree.open[: tree.budget] if hypothesis.likelihood >= floor]
            if not worthwhile:
                del self._sessions[session]  # until its next verdict
            for hypothesis in worthwhile:
                yield session, hypothesis


def _likelihood(choice: tuple[Guessing, Hypothesis]) -> float:
    return choice[1].likelihood


class Pace:
    """How long a step of a batch takes, as a straight line over its rows, fitted to the latest batches."""

    #: Share of its weight a batch keeps when the next one comes.
    MEMORY: Final = 0.95
    #: How much a row adds to the time of a single one, before batches of different sizes were seen.
    FIRST_SLOPE: Final = 0.25

    def __init__(self) -> None:
        # Weighted sums: 1, rows, rows squared, nanoseconds a step, rows times that, steps.
        self._sums = [0.0] * 6

    def count(self, num_rows: int, num_steps: int, spent_ns: int) -> None:
        """Add a batch."""
        step_ns = spent_ns / num_steps
        new = (1.0, num_rows, num_rows**2, step_ns, num_rows * step_ns, num_steps)
        self._sums = [self.MEMORY * old + value for old, value in zip(self._sums, new, strict=True)]

    def max_rows(self) -> int:
        """The largest batch that is short enough: ``BATCH_NS``, or twice as long as one row takes."""
        weight, rows, squares, step_ns, products, steps = self._sums
        if not weight:
            return MAX_ROWS
        mean_rows, mean_ns = rows / weight, step_ns / weight
        spread = squares / weight - mean_rows**2
        if spread > 0.01:
            slope = max(0.0, (products / weight - mean_rows * mean_ns) / spread)
        else:
            slope = mean_ns * self.FIRST_SLOPE / (1.0 + self.FIRST_SLOPE * (mean_rows - 1.0))
        one = max(mean_ns + slope * (1.0 - mean_rows), 0.1 * mean_ns)
        limit = max(BATCH_NS * weight / steps, 2.0 * one)
        return MAX_ROWS if slope == 0.0 else min(MAX_ROWS, 1 + int((limit - one) / slope))


class Load:
    """The share of its time that the device spends on wishes, over the last ``WINDOW_NS`` or so."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._share = 0.0
        self._at_ns = now_ns()

    def add_busy(self, spent_ns: int) -> None:
        """The last ``spent_ns`` were spent on wishes."""
        now_ns = self._now_ns()
        idle_ns = max(0, now_ns - spent_ns - self._at_ns)
        self._share *= math.exp(-idle_ns / WINDOW_NS)
        self._share = 1.0 - (1.0 - self._share) * math.exp(-spent_ns / WINDOW_NS)
        self._at_ns = now_ns

    def share(self) -> float:
        """The share at this moment, in [0, 1]."""
        return self._share * math.exp(-(self._now_ns() - self._at_ns) / WINDOW_NS)
