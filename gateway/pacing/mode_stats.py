"""Who leads at one load, speculation or plain decoding, by the comparisons so far, and when the next one is due."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

#: The unit of time is a cycle of plain decoding, or this many nanoseconds where that is more: what shorter turns
#: measure is the hiccups of the machine.
MIN_UNIT_NS: Final = 6_000_000
#: Units of a turn, and of one that is clear: there the speeds differ by so much (logarithm of their ratio; more than
#: four times that counts as four times that).
TURN: Final = 16
CLEAR_TURN: Final = 8
CLEAR: Final = 0.3
#: Logarithm of the ratio of the speeds from which speculation leads: it takes power and the draft's time besides.
MARGIN: Final = 0.02
#: The median of so many comparisons at a load counts; the first is one in which both ways were as fast.
MEMORY: Final = 5
#: Standard error of a comparison of one turn with two others, in deviations of a turn, and of a median over that of a
#: mean, for normal values.
COMPARISON_ERROR: Final = math.sqrt(1.5)
MEDIAN_ERROR: Final = math.sqrt(math.pi / 2.0)
#: Units between two comparisons; doubled while the same way leads, up to the second, where that is not sure, or
#: the third, which comes at once where it leads clearly.
FIRST_PAUSE: Final = 64
UNSURE_PAUSE: Final = 256
LAST_PAUSE: Final = 1024


@dataclass(slots=True)
class ModeStats:
    """What comparisons at one load have shown."""

    #: Logarithms of the speed with speculation over that without, the latest last.
    log_ratios: deque[float] = field(default_factory=lambda: deque((0.0,), MEMORY))
    speculation_leads: bool = False
    num_comparisons: int = 0
    #: Units between the last comparison and the next one, and those left until then.
    pause: int = 0
    left: float = 0.0

    @property
    def log_ratio(self) -> float:
        """Logarithm of the speed with speculation over that without: the median."""
        return median(self.log_ratios)

    @property
    def cost(self) -> float:
        """What a turn of the other way may lose, in units."""
        return self.turn_length * (1.0 - math.exp(-abs(self.log_ratio)))

    @property
    def turn_length(self) -> int:
        """Units that a turn should last."""
        return CLEAR_TURN if abs(self.log_ratio) > CLEAR else TURN

    def learn(self, log_ratio: float, noise: float) -> None:
        """Add a comparison of turns with a deviation of ``noise``. The lead changes where it is beyond one standard
        error.
        """
        led = self.speculation_leads
        self.num_comparisons += 1
        self.log_ratios.append(log_ratio)
        error = MEDIAN_ERROR * COMPARISON_ERROR * noise / math.sqrt(len(self.log_ratios))
        ahead = self.log_ratio - MARGIN
        if abs(ahead) > error:
            self.speculation_leads = ahead > 0.0
        if self.speculation_leads is led:
            if abs(self.log_ratio) > CLEAR:
                self.pause = LAST_PAUSE
            self.put_off(LAST_PAUSE if abs(ahead) > 2.0 * error else UNSURE_PAUSE)
        else:
            self.pause = FIRST_PAUSE
            self.left = float(FIRST_PAUSE)

    def put_off(self, longest: int = LAST_PAUSE) -> None:
        """The next comparison comes later."""
        self.pause = min(max(2 * self.pause, FIRST_PAUSE), longest)
        self.left = float(self.pause)

    def doubt(self) -> None:
        """Things have changed: what was measured before counts no more, but who led leads."""
        self.log_ratios = deque((0.0,), MEMORY)

    def follow(self, other: ModeStats) -> None:
        """Until it is measured here, what leads at another load leads."""
        self.log_ratios = deque((other.log_ratio,), MEMORY)
        self.speculation_leads = other.speculation_leads
