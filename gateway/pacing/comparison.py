"""Which way of decoding is faster on one target, with drafts or without: measured against each other while serving.

A model of costs and acceptance says how many tokens to draft, but not reliably whether to draft at all: rounds of
several sessions split the target's batches, share cores with the draft, wait for each other. So that is measured. The
way that leads is left now and then for one turn of the other way, and what the turn brought is compared with what the
leading way brought before and after it. Whatever makes a round slow is in the measurement.

Legal under every rule: the choice depends on the times and numbers of past rounds only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.pacing.exploration_budget import ALLOWED_LOSS
from gateway.pacing.mode_stats import CLEAR, CLEAR_TURN, FIRST_PAUSE, TURN, ModeStats

#: A cycle longer than this many times the mean of its turn counts as this many times the mean, after the first few.
OUTLIER: Final = 3.0
FEW: Final = 4
#: Deviation of the logarithm of what a turn measures: a first guess, and the weight of the newest observation of it.
FIRST_NOISE: Final = 0.08
NEWEST: Final = 0.1
#: Where speculation falls below this share of its speed at the last comparison, and has lost its lead by that if plain
#: decoding is as fast as it was, the next one comes at once.
DROP: Final = 0.9
#: What a turn may lose before it is broken off, in units, and how long it may last.
MAX_TURN_LOSS: Final = 8.0
MAX_TURN_LENGTH: Final = 128.0
#: A cycle counts as slower than the leading way by this factor at most.
MAX_SLOWNESS: Final = 8.0
#: The load is another one when the number of sessions is this many times more or less.
OTHER_LOAD: Final = 1.6


class Phase(Enum):
    """What the contest is doing."""

    #: The leading way runs.
    LEADING = auto()
    #: The other way has its turn.
    TURN = auto()
    #: The leading way again, for comparison.
    AFTER = auto()


@dataclass(slots=True)
class ThroughputWindow:
    """Cycles of sessions one after another: how many, what they brought, and how long they took. They may fade."""

    num_cycles: float = 0.0
    num_tokens: float = 0.0
    ns: float = 0.0

    def add(self, num_tokens: int, cycle_ns: float, memory_ns: float = math.inf) -> None:
        """A cycle brought ``num_tokens``; the last ``memory_ns`` count."""
        if self.num_cycles >= FEW:
            cycle_ns = min(cycle_ns, OUTLIER * self.ns / self.num_cycles)
        fade = max(0.0, 1.0 - cycle_ns / memory_ns)
        self.num_cycles = self.num_cycles * fade + 1.0
        self.num_tokens = self.num_tokens * fade + num_tokens
        self.ns = self.ns * fade + cycle_ns

    @property
    def token_ns(self) -> float:
        """What a token takes a session."""
        return self.ns / max(self.num_tokens, 1e-9)


class ModeComparison:
    """Speculation against plain decoding. All sessions of a target decode the same way at a time."""

    def __init__(self) -> None:
        #: Counts the turns: what a session was told in an earlier one is out of date.
        self.turn = 0
        self.phase = Phase.LEADING
        #: Whether sessions draft now.
        self.speculates = False
        self._standings: dict[float, ModeStats] = {}
        self._standing = ModeStats()
        #: The number of sessions the standing is of, and the present one, smoothed.
        self._load = self._num_sessions = 0.0
        #: The unit of time, times the sessions that take part.
        self._unit_ns = 1.0
        self._leading = ThroughputWindow()
        self._turn = ThroughputWindow()
        #: What a token took the leading way when it was compared last; 0 before that.
        self._compared_ns = 0.0
        #: Units that a turn, or what comes after it, has lasted, and what it has lost.
        self._lasted = self._lost = 0.0
        self._may_speculate = False
        #: Of the logarithm of what a turn measures.
        self._variance = FIRST_NOISE**2

    def waiting(self, savings: float) -> float:
        """Units of time until the other way may have its turn, with so much to pay it from."""
        return max(0.0, self._standing.left, (self._standing.cost - savings) / ALLOWED_LOSS)

    @property
    def turn_length(self) -> int:
        """Units of time that a turn of the other way should last."""
        return self._standing.turn_length

    def allow(self, may_speculate: bool) -> None:
        """Whether speculation could pay at all, from what is known of acceptance and costs."""
        if may_speculate and not self._may_speculate:
            self._standing.left = min(self._standing.left, FIRST_PAUSE)
        self._may_speculate = may_speculate
        if self.speculates is not self._leads and (self.phase is Phase.LEADING or not may_speculate):
            self._lead()

    def record(self, num_sessions: int, num_tokens: int, cycle_ns: float, unit_ns: float, *, counts: bool) -> float:
        """One of ``num_sessions`` sessions took ``cycle_ns`` for ``num_tokens``.

        ``unit_ns``: a unit of time; ``counts``: the session decodes as all are meant to now.

        Returns what it lost against the leading way, in units of all these sessions.
        """
        self._unit_ns = unit_ns * num_sessions
        spent = cycle_ns / self._unit_ns
        if self.phase is Phase.LEADING:
            self._standing.left -= spent
            if counts:
                self._leading.add(num_tokens, cycle_ns, 2.0 * TURN * self._unit_ns)
            return 0.0
        usual_ns = self._compared_ns * num_tokens
        lost = (min(cycle_ns, MAX_SLOWNESS * usual_ns) - usual_ns) / self._unit_ns
        self._lost += lost
        self._lasted += spent
        stretch = self._turn if self.phase is Phase.TURN else self._leading
        if counts:
            stretch.add(num_tokens, cycle_ns)
        is_over = stretch.ns >= (CLEAR_TURN if self._is_clear else TURN) * self._unit_ns
        if is_over or self._lost > MAX_TURN_LOSS or self._lasted > MAX_TURN_LENGTH:
            self._end_phase()
        return lost

    def follow_load(self, num_sessions: float) -> None:
        """So many sessions are open on the target. Another load has a standing of its own."""
        if not self._load:
            self._num_sessions = num_sessions
        self._num_sessions += (num_sessions - self._num_sessions) / (4.0 * max(num_sessions, 1.0))
        if self._load / OTHER_LOAD < self._num_sessions < self._load * OTHER_LOAD:
            return
        if self.phase is not Phase.LEADING:
            self._end_phase(is_last=True)
        self._load = 2.0 ** round(math.log2(max(self._num_sessions, 1.0)))
        known = self._standings.setdefault(self._load, ModeStats())
        if not known.num_comparisons:
            near = (self._standings.get(self._load * factor) for factor in (0.5, 2.0))
            known.follow(next((other for other in near if other and other.num_comparisons), ModeStats()))
        self._standing = known
        self._lead()

    def consider(self, savings: float) -> bool:
        """Begin a turn of the other way if it is time for it and its cost is in the ``savings``; whether it did."""
        if self.phase is not Phase.LEADING or not self._may_speculate:
            return False
        if self._leading.ns < CLEAR_TURN * self._unit_ns:
            return False
        has_dropped = self.speculates and 0.0 < self._compared_ns < self._drop * self._leading.token_ns
        if has_dropped:
            self._standing.doubt()
        if savings < self._standing.cost or (self._standing.left > 0.0 and not has_dropped):
            return False
        self._compared_ns = self._leading.token_ns
        self._turn = ThroughputWindow()
        self._begin(Phase.TURN, not self.speculates)
        return True

    @property
    def _drop(self) -> float:
        return min(DROP, math.exp(-self._standing.log_ratio))

    @property
    def _is_clear(self) -> bool:
        return self.phase is Phase.TURN and abs(self._compare(self._compared_ns)) > CLEAR

    def _compare(self, leading_ns: float) -> float:
        """Logarithm of the other way's speed in its turn over that of the leading one."""
        log_ratio = math.log(leading_ns / max(self._turn.token_ns, 1e-9)) if self._turn.num_cycles else 0.0
        return min(max(log_ratio, -4.0 * CLEAR), 4.0 * CLEAR)

    def _end_phase(self, *, is_last: bool = False) -> None:
        """The turn or what came after it is over; ``is_last``: and with it the comparison."""
        is_turn = self.phase is Phase.TURN
        if is_turn and self._turn.ns < (CLEAR_TURN if is_last else 1.0) * self._unit_ns:
            # Hardly anyone ever got there: nothing was learned.
            self._standing.put_off()
            self._lead()
            return
        if is_turn and not self._is_clear and not is_last:
            self._leading = ThroughputWindow()
            self._begin(Phase.AFTER, not self.speculates)
            return
        leading_ns = self._compared_ns
        if not is_turn and self._leading.ns >= CLEAR_TURN * self._unit_ns:
            # Two stretches of the same way differ by noise alone.
            change = min(abs(math.log(self._leading.token_ns / leading_ns)), CLEAR)
            self._variance += NEWEST * (change * change / 2.0 - self._variance)
            leading_ns = math.sqrt(leading_ns * self._leading.token_ns)
        log_ratio, led = self._compare(leading_ns), self.speculates is not is_turn
        self._standing.learn(-log_ratio if led else log_ratio, math.sqrt(self._variance))
        if is_turn or self._standing.speculation_leads is not led:
            self._lead()
        else:
            self.phase = Phase.LEADING

    @property
    def _leads(self) -> bool:
        return self._may_speculate and self._standing.speculation_leads

    def _lead(self) -> None:
        """The leading way from now on."""
        self._leading = ThroughputWindow()
        self._begin(Phase.LEADING, self._leads)

    def _begin(self, phase: Phase, speculates: bool) -> None:
        self.turn += speculates is not self.speculates or phase is not self.phase
        self.phase, self.speculates, self._lasted, self._lost = phase, speculates, 0.0, 0.0
