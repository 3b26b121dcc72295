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
#: rounds had 2.05 of plain speed and a stream 1.89, at 0.71 1.49 and 1.77 (each forced, steps of 28 ms).
STREAMS_FROM: Final = 0.3
WAITS_BELOW: Final = 0.2
#: The part of both where steps have several sessions, which wait for each other's trips, too: eight had 1.14 to 1.67 of
#: plain speed in rounds and 1.79 streamed at 0.2 of a step of 100 ms, 1.70 and 1.77 at 0.18 of 28 ms.
SHARED: Final = 1 / 3
#: Trips that a draft stays far away after a proposal was held up: with 1 % of the packets lost, a round in fifty waits
#: for TCP's timeout of 200 ms.
HELD_UP: Final = 32


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
        self._num_sessions: deque[int] = deque(maxlen=MEMORY)
        self._waits: deque[int] = deque(maxlen=MEMORY)
        self._answers: deque[int] = deque(maxlen=MEMORY)
        self._num_held_up = 0
        #: Tokens of a proposal that its streams bring; 0: none is known to stream.
        self.stream_tokens = 0
        #: Whether a proposal takes too long to wait for.
        self.is_far = is_far

    def add_trip(self, trip_ns: int) -> None:
        """A proposal came so long after it was asked for, the time of drafting it left out."""
        self._trips.append(max(0, trip_ns))
        self._num_held_up = max(0, self._num_held_up - 1)
        if self._num_held_up == 0 and self._steps and len(self._trips) >= LEAST and not self._is_fixed:
            share = WAITS_BELOW if self.is_far else STREAMS_FROM
            if median(self._num_sessions) > 1:
                share *= SHARED
            self.is_far = min(self._trips) > share * median(self._steps)

    def add_step(self, step_ns: int, num_sessions: int) -> None:
        """A step with so many sessions took so long."""
        self._steps.append(step_ns)
        self._num_sessions.append(num_sessions)

    def add_wait(self, wait_ns: int) -> None:
        """A proposal was waited for so long, its drafting included."""
        self._waits.append(wait_ns)

    def add_answer(self, answer_ns: int) -> None:
        """A chain began so long after the draft was told of the token that ended the one before, drafting included."""
        self._answers.append(answer_ns)

    @property
    def answer_ns(self) -> int:
        """How long that takes, but for outliers; 0 where it is not known, or where no step may wait for the draft."""
        return 0 if self._is_fixed or len(self._answers) < LEAST else sorted(self._answers)[-2:][0]

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a proposal that a stream can replace; None: until it comes."""
        if self._is_fixed or not self._steps or len(self._waits) < LEAST:
            return None
        return (2 * max(self._waits) + median(self._steps)) / 1e9

    def hold_up(self) -> None:
        """Patience ended: the draft counts as far away for a while."""
        self.is_far, self._num_held_up = True, HELD_UP

    @property
    def num_steps(self) -> int:
        """Steps that begin while a proposal is on its way; 0 while nothing is known."""
        if not self._steps or not self._trips:
            return 0
        return math.ceil(median(self._trips) / max(1.0, median(self._steps)))
