"""The learning rate over steps: warm-up, a constant rate, linear decay to zero.

The number of steps is fixed at the start, but a wall-clock limit may lower it: the decay then
begins early and still ends at zero. A pause of the process costs steps and breaks nothing.
"""

import time
from dataclasses import dataclass, field
from statistics import median

NUM_RECENT = 25


@dataclass(frozen=True)
class ScheduleSettings:
    """`max_minutes` counts from the start of the process; 0 means no limit."""

    num_steps: int
    warmup_steps: int = 50
    decay_share: float = 0.3
    max_minutes: float = 0.0


@dataclass
class Schedule:
    """Hands out the learning rate's factor, step by step."""

    settings: ScheduleSettings
    step: int = 0
    start_s: float = field(default_factory=time.monotonic)
    num_steps: int = 0
    _last_s: float = field(default_factory=time.monotonic)
    _recent_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_steps = self.num_steps or self.settings.num_steps

    @property
    def decay_steps(self) -> int:
        """Steps of the decay, a share of the steps there will be."""
        return max(1, round(self.num_steps * self.settings.decay_share))

    @property
    def in_decay(self) -> bool:
        """True while the rate falls."""
        return self.num_steps - self.step < self.decay_steps

    @property
    def done(self) -> bool:
        """True once all steps are made."""
        return self.step >= self.num_steps

    def factor(self) -> float:
        """The factor of the current step, in [0, 1]."""
        warm = (self.step + 1) / max(1, self.settings.warmup_steps)
        cold = (self.num_steps - self.step) / self.decay_steps
        return min(1.0, warm, cold)

    def advance(self) -> None:
        """Counts one step made, and lowers the number of steps to what the limit allows."""
        now = time.monotonic()
        self._recent_s = [*self._recent_s[1 - NUM_RECENT :], now - self._last_s]
        self._last_s = now
        self.step += 1
        if self.settings.max_minutes and len(self._recent_s) >= 5:
            left_s = self.start_s + 60 * self.settings.max_minutes - now
            fitting = self.step + max(0, int(left_s / median(self._recent_s)))
            # Before the decay the estimate may rise again; within it, it may only fall.
            limit = self.num_steps if self.in_decay else self.settings.num_steps
            self.num_steps = min(limit, fitting)
