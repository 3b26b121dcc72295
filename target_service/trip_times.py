"""How far a draft is away, in steps of the target: whether to wait for its proposals."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

#: Times that count, and how many of them tell enough.
MEMORY: Final = 9
LEAST: Final = 3
#: A trip from this share of a step on is not waited for; back to waiting it goes below the other one. At 0.18 of a step
#: rounds had 2.05 of plain speed and a stream 1.89, at 0.71 1.49 and 1.77 (``python -m benchmarks.distance``).
STREAMS_FROM: Final = 0.3
WAITS_BELOW: Final = 0.2


class TripTimes:
    """Of one draft: trips, without the time of drafting, and steps beside them, as all sessions measured them.

    The shortest of the latest trips tells the distance: others met a busy draft. Drafting itself is no reason not to
    wait: where draft and target share cores, one that drafts all the time slows down the steps.
    """

    def __init__(self, *, is_far: bool = False, is_fixed: bool = False) -> None:
        """``is_far``: what is taken for true until it is measured. A stream measures it without waiting. ``is_fixed``:
        it stays true. A draft on this machine shares its cores and is never far away; one that is not trusted, never
        near.
        """
        self._is_fixed = is_fixed
        self._trips: deque[int] = deque(maxlen=MEMORY)
        self._steps: deque[int] = deque(maxlen=MEMORY)
        #: Whether a proposal takes too long to wait for.
        self.is_far = is_far

    def add_trip(self, trip_ns: int) -> None:
        """A proposal came so long after it was asked for, the time of drafting it left out."""
        self._trips.append(max(0, trip_ns))
        if self._steps and len(self._trips) >= LEAST and not self._is_fixed:
            share = WAITS_BELOW if self.is_far else STREAMS_FROM
            self.is_far = min(self._trips) > share * median(self._steps)

    def add_step(self, step_ns: int) -> None:
        """A step took so long."""
        self._steps.append(step_ns)

    @property
    def num_steps(self) -> int:
        """Steps that begin while a proposal is on its way; 0 while nothing is known."""
        if not self._steps or not self._trips:
            return 0
        return math.ceil(median(self._trips) / max(1.0, median(self._steps)))
