"""Whether a step should wait a moment for the sessions that are about to come back with their next rounds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

#: Weight of the newest turnaround.
NEWEST: Final = 0.1
#: A session is expected back after the mean turnaround and so many mean deviations more; nobody waits for later ones.
PATIENCE: Final = 2.0
#: Nanoseconds in which a session may come back as long as too few turnarounds were seen.
FIRST_NS: Final = 20_000_000
#: Turnarounds seen before any step waits.
WARM_UP: Final = 16
#: Waiting must promise to shorten the cycle to this share.
WORTH_IT: Final = 0.97

#: Nanoseconds of a step of so many rows and sessions.
StepTime = Callable[[int, int], float]


@dataclass(slots=True)
class _Absence:
    since_ns: int
    rows: int


class RoundCoalescer:
    """Keeps sessions that draft between their rounds together in one step.

    A round's verdict leaves, the draft drafts, the next round comes in. If the target used that moment for a step of
    those who happen to be ready, the sessions would fall into two groups that take turns, and what a step costs
    whatever its size (reading the weights) would be paid twice. With r rows ready, a rows still away and a step time T,
    two groups take T(r) + T(a) for a round of everybody, one takes the wait and T(r + a). The shorter one is chosen, on
    the times of past rounds alone.
    """

    def __init__(self) -> None:
        self._away: dict[Hashable, _Absence] = {}
        self._turnaround_ns = self._deviation_ns = 0.0
        self._num_seen = 0

    def left(self, session: Hashable, num_rows: int, now_ns: int) -> None:
        """The verdict of a round of ``num_rows`` rows with drafted tokens left; another round should follow."""
        self._away[session] = _Absence(now_ns, num_rows)

    def came(self, session: Hashable, now_ns: int) -> None:
        """The session has something to feed."""
        absence = self._away.pop(session, None)
        if absence is None:
            return
        turnaround_ns = float(now_ns - absence.since_ns)
        weight = max(NEWEST, 1.0 / (self._num_seen + 1))
        self._num_seen += 1
        if self._num_seen > WARM_UP:
            turnaround_ns = min(turnaround_ns, 4.0 * self._turnaround_ns)
        self._turnaround_ns += weight * (turnaround_ns - self._turnaround_ns)
        self._deviation_ns += weight * (abs(turnaround_ns - self._turnaround_ns) - self._deviation_ns)

    def forget(self, session: Hashable) -> None:
        """The session is closed: nobody waits for it any more."""
        self._away.pop(session, None)

    def expects(self, now_ns: int) -> bool:
        """Whether a session should come back with a round before long."""
        patience_ns = PATIENCE * (self._turnaround_ns + self._deviation_ns) if self._num_seen >= WARM_UP else FIRST_NS
        return any(now_ns - absence.since_ns < patience_ns for absence in self._away.values())

    def wait_until(self, num_rows: int, num_sessions: int, now_ns: int, step_ns: StepTime) -> int:
        """When the next step should begin at the latest, with so many rows of so many sessions ready now."""
        if self._num_seen < WARM_UP or not self._away:
            return now_ns
        expected_ns = int(self._turnaround_ns + PATIENCE * self._deviation_ns)
        for session in [key for key, absence in self._away.items() if absence.since_ns + expected_ns <= now_ns]:
            del self._away[session]
        if not self._away:
            return now_ns
        rows, sessions = sum(absence.rows for absence in self._away.values()), len(self._away)
        until_ns = max(absence.since_ns for absence in self._away.values()) + expected_ns
        apart_ns = step_ns(num_rows, num_sessions) + step_ns(rows, sessions)
        together_ns = until_ns - now_ns + step_ns(num_rows + rows, num_sessions + sessions)
        return until_ns if together_ns < WORTH_IT * apart_ns else now_ns
