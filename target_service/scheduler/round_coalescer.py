"""Decides whether a step waits a moment for sessions that are about to return with their next rounds."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Final

#: Weight of the newest turnaround.
NEWEST: Final = 0.1
#: A session is expected back after the mean turnaround and so many mean deviations more; no step waits longer. With 2,
#: steps that waited had 0.71 of the sessions in a simulation of eight; with 4, 0.99. Prompts and multi-step decode make
#: room for a session as long as it is expected; for twice as long is no faster (processes, two cores, 8 sessions).
PATIENCE: Final = 4.0
#: Nanoseconds in which a session may come back as long as too few turnarounds were seen.
FIRST_NS: Final = 20_000_000
#: Others that are ready are held up by this share of a step at most. Where they never were, 1,573 of 2,548 rounds of
#: eight sessions came every other step.
OTHERS: Final = 0.3
#: A step waits for chains of far drafts by this share of itself at most, times the share of its sessions that get one.
#: Simulated, one session, trips of 0.83 and 1.0 steps with 20 % jitter: 1.63 of plain without, 1.81 with it, and 1.71,
#: 1.85; 8 sessions 1.62, 1.74 and 1.70, 1.79. Shares of 0.3 to 0.8 do the same; at 1.2 it falls to 1.52.
#: On processes, steps of 100 ms and a trip of 100 ms: 1.88 of plain with it, 1.78 without; at 6 and 5 ms no difference.
CHAINS: Final = 0.5
#: Turnarounds seen before they count.
WARM_UP: Final = 16
#: Rounds of each session in a window: one to get into the way of the window, and those that are measured.
SETTLING_ROUNDS: Final = 1
WINDOW_ROUNDS: Final = 8
#: Pairs of neighbouring windows that are compared: the median counts.
NUM_COMPARED: Final = 3
#: The worse way is tried again in one window of so many: a way that is a quarter worse costs 0.4 % so.
RETRY_INTERVAL: Final = 64


class RoundCoalescer:
    """Keeps the rounds of all drafting sessions together in one step, where that is faster.

    A verdict leaves, the draft drafts, the next round arrives. A step of the sessions that are ready meanwhile splits
    the sessions into groups that take turns. The fixed cost of a step (reading the weights) is then paid for each of
    them. On the other hand the target computes for one group while the draft works for another, unless they share
    cores. What is better depends on model, draft and machine, and is measured: tokens per second in windows with and
    without waiting, at each number of sessions (within a factor of 1.4).

    With the processes of ``tandem serve`` on two cores and a fixed draft length, tokens per second over those with the
    predicted times of steps that decided before: 1.30 at 8 sessions, 1.42 at 4 (one way in every other second).
    """

    def __init__(self) -> None:
        #: Open sessions that have drafted.
        self._sessions: set[Hashable] = set()
        #: Since when each session is away, and how many steps had begun then.
        self._away: dict[Hashable, tuple[int, int]] = {}
        self._num_steps = 0
        self._turnaround_ns = self._deviation_ns = self._step_ns = 0.0
        self._num_seen = 0
        self._ways: defaultdict[int, _Ways] = defaultdict(_Ways)
        #: The window that runs: its load (-1: nobody drafts), when it was settled, and what steps did since.
        self._load = -1
        self._num_in_window = self._num_tokens = 0
        self._since_ns = 0

    def left(self, session: Hashable, now_ns: int) -> None:
        """The verdict of a round left; another round should follow."""
        self._sessions.add(session)
        self._away[session] = (now_ns, self._num_steps)

    def came(self, session: Hashable, now_ns: int) -> None:
        """The session has something to feed. Its turnaround counts if no step began meanwhile, which may hold it up, or
        if it is no longer than twice the usual: else, simulated, seven sessions beside a plain one have 0.6 of the
        speed.
        """
        if session not in self._away:
            return
        since_ns, num_steps = self._away.pop(session)
        turnaround_ns = float(now_ns - since_ns)
        if num_steps != self._num_steps and turnaround_ns > (2.0 * self._turnaround_ns or FIRST_NS):
            return
        weight = max(NEWEST, 1.0 / (self._num_seen + 1))
        self._num_seen += 1
        if self._num_seen > WARM_UP:
            turnaround_ns = min(turnaround_ns, 4.0 * self._turnaround_ns)
        self._turnaround_ns += weight * (turnaround_ns - self._turnaround_ns)
        self._deviation_ns += weight * (abs(turnaround_ns - self._turnaround_ns) - self._deviation_ns)

    def forget(self, session: Hashable) -> None:
        """The session is closed: no step waits for it."""
        self._sessions.discard(session)
        self._away.pop(session, None)

    @property
    def _expected_ns(self) -> int:
        """A session is expected back so long after its verdict."""
        if self._num_seen < WARM_UP:
            return FIRST_NS
        return int(self._turnaround_ns + PATIENCE * self._deviation_ns)

    def expects(self, now_ns: int) -> bool:
        """Whether a session should come back with a round before long."""
        expected_ns = self._expected_ns
        return any(now_ns - since_ns < expected_ns for since_ns, _ in self._away.values())

    def wait_until(self, now_ns: int, *, has_others: bool = False) -> int:
        """When the next step should begin at the latest, in nanoseconds; ``now_ns``: at once. Some session is ready.

        ``has_others``: sessions without rounds are ready, too. A step that left without those who are about to come
        would have them every other time.
        """
        if not self._away or not self._ways[self._load].waits:
            return now_ns
        expected_ns = self._expected_ns
        if has_others and expected_ns > OTHERS * self._step_ns:
            return now_ns
        for session in [key for key, (since_ns, _) in self._away.items() if since_ns + expected_ns <= now_ns]:
            del self._away[session]
        return max((since_ns for since_ns, _ in self._away.values()), default=now_ns - expected_ns) + expected_ns

    def wait_for_chains(self, due_ns: Sequence[int], num_ready: int, now_ns: int) -> int:
        """The same for chains of far drafts. ``due_ns``: when some should come, for sessions among ``num_ready``."""
        until_ns = now_ns
        for count, due in enumerate(sorted(due_ns), 1):
            if (due - now_ns) * num_ready <= CHAINS * self._step_ns * count:
                until_ns = due
        return until_ns

    def step_begins(self) -> None:
        """A step begins with the sessions that are ready."""
        self._num_steps += 1

    def step_ended(self, num_rounds: int, num_tokens: int, now_ns: int, step_ns: int = 0) -> None:
        """A step of ``step_ns`` has committed ``num_tokens`` tokens, in ``num_rounds`` rounds and otherwise."""
        self._step_ns += (NEWEST if self._step_ns else 1.0) * (step_ns - self._step_ns)
        num_open = len(self._sessions)
        load = round(2 * math.log2(num_open)) if num_open else -1
        if load != self._load:
            self._load = load
            self._begin_window()
        if not num_open:
            return
        self._num_in_window += num_rounds
        if not self._since_ns:
            if self._num_in_window >= SETTLING_ROUNDS * num_open:
                self._num_in_window, self._num_tokens, self._since_ns = 0, 0, now_ns
            return
        self._num_tokens += num_tokens
        if self._num_in_window >= WINDOW_ROUNDS * num_open:
            self._ways[load].record(max(1, self._num_tokens) / max(1, now_ns - self._since_ns))
            self._begin_window()

    def _begin_window(self) -> None:
        self._num_in_window = self._num_tokens = self._since_ns = 0


class _Ways:
    """How waiting compares with not waiting at one load, and which of them is used now."""

    def __init__(self) -> None:
        self.waits = True
        #: Speed with waiting over that without, of neighbouring windows: both see the machine in the same state.
        self._gains: deque[float] = deque(maxlen=NUM_COMPARED)
        #: The window before: whether steps waited, and its speed.
        self._before: tuple[bool, float] | None = None
        self._num_windows = 0

    def record(self, speed: float) -> None:
        """A window has ended."""
        if self._before is not None:
            waited, before = self._before
            if waited is not self.waits:
                self._gains.append(speed / before if self.waits else before / speed)
        self._before = (self.waits, speed)
        self._num_windows += 1
        if len(self._gains) < NUM_COMPARED:
            self.waits = not self.waits
        else:
            self.waits = (median(self._gains) >= 1.0) is (self._num_windows % RETRY_INTERVAL != 0)
