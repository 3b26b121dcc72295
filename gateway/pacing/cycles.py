"""How long a session's cycles take, from one verdict to the next, by the number of open sessions; learned online."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from specdec.types import RoundTimings

#: Cycles of each session that are remembered: newer ones replace older ones with this weight at least.
MEMORY: Final = 32
#: A cycle longer than this many times the usual counts as this many times the usual.
OUTLIER: Final = 3.0
#: Cycles of each session after which they count as measured.
MEASURED: Final = 4
#: Doublings of the number of sessions beyond which a measurement says nothing.
FAR: Final = 1.0


@dataclass(slots=True)
class Cycle:
    """Fading means over the cycles of sessions while about so many were open."""

    num_sessions: float
    count: int = 0
    cycle_ns: float = 0.0
    #: Of these the target's work for the step that carried the session, and waiting on the target for it. What is left
    #: is drafting that nothing hides, network, messages and hand-overs.
    target_ns: float = 0.0
    num_draft_tokens: float = 0.0

    @property
    def rest_ns(self) -> float:
        """What the cycle takes beyond the target."""
        return max(0.0, self.cycle_ns - self.target_ns)

    @property
    def is_measured(self) -> bool:
        """Whether every session has had a few cycles."""
        return self.count >= MEASURED * self.num_sessions


class Cycles:
    """Cycles of one way of decoding on one target."""

    def __init__(self) -> None:
        self._cycles: dict[int, Cycle] = {}

    def record(self, num_sessions: int, cycle_ns: float, timings: RoundTimings, num_draft_tokens: int) -> None:
        """A session's cycle took ``cycle_ns`` while ``num_sessions`` were open."""
        cycle = self._cycles.setdefault(_bucket(num_sessions), Cycle(float(num_sessions)))
        if cycle.count > 3:
            cycle_ns = min(cycle_ns, OUTLIER * cycle.cycle_ns)
        cycle.count += 1
        # A stall hits all sessions at once: what one of them remembers must not be all of one stall.
        weight = 1.0 / min(cycle.count, MEMORY * num_sessions)
        target_ns = min(float(timings.forward_ns + timings.verify_ns + timings.queue_ns), cycle_ns)
        cycle.num_sessions += (num_sessions - cycle.num_sessions) * weight
        cycle.cycle_ns += (cycle_ns - cycle.cycle_ns) * weight
        cycle.target_ns += (target_ns - cycle.target_ns) * weight
        cycle.num_draft_tokens += (num_draft_tokens - cycle.num_draft_tokens) * weight

    def nearest(self, num_sessions: float) -> Cycle | None:
        """What was measured at about so many sessions; None where nothing was."""
        near = [cycle for cycle in self._cycles.values() if _doublings(cycle.num_sessions, num_sessions) <= FAR]
        return min(
            near, key=lambda cycle: (not cycle.is_measured, _doublings(cycle.num_sessions, num_sessions)), default=None
        )


def _bucket(count: int) -> int:
    """Two buckets for each doubling."""
    return round(2.0 * math.log2(max(count, 1)))


def _doublings(a: float, b: float) -> float:
    return abs(math.log2(max(a, 0.5) / max(b, 0.5)))
