"""How long rounds and plain tokens take at one load: medians over windows of what all sessions measured."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

#: Windows that count: the median of three ignores one stall of the machine and takes up a change with the second.
MEMORY: Final = 3
#: A window lasts this long and has this many verdicts of each session; shorter ones measure the machine's hiccups.
WINDOW_NS: Final = 50_000_000
WINDOW_VERDICTS: Final = 4
#: A window is so many times longer while the mode stays what it was: prompts and stalls that fall into a short one make
#: plain tokens look slow. With short ones only, four sessions of the bundled pair decoded at 0.81 of plain speed in one
#: run; with these at 0.98.
STEADY_WINDOWS: Final = 4
#: Share of a window's session time that one mode must take to be measured. What the other one took is subtracted at
#: its own price; where both take more, sessions miss each other's steps, which says nothing of either mode.
PURE: Final = 0.8
#: Plain tokens whose time a round without drafted tokens takes, and what each drafted token adds to it, relatively:
#: assumed where no round was measured. Measured 1.3 and 0.1 on the bundled pair, less on larger targets; optimistic,
#: so that speculation is tried.
FIRST_ROUND: Final = 1.2
TOKEN: Final = 0.06


class RoundTimes:
    """Nanoseconds of session time that a plain token and a round cost while about so many sessions are open.

    Times are sums over all sessions: where rounds of some slow down the plain tokens of others (a step carries both,
    the draft takes a core), the rounds are charged with it.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=MEMORY)
        #: Of a round without drafted tokens, by the assumed slope.
        self._round: deque[float] = deque(maxlen=MEMORY)
        self.plain_at_ns = self.round_at_ns = 0
        #: Time of a plain token; 0: unknown.
        self.plain_ns = 0.0
        #: Of a round without drafted tokens, in plain tokens.
        self._round_cost = FIRST_ROUND
        #: Whether the latest window that was measured was one of rounds.
        self._was_rounds = False
        self._clear()

    @property
    def is_measured(self) -> bool:
        """Whether the time of a plain token is known."""
        return bool(self._plain)

    @property
    def is_certain(self) -> bool:
        """Whether there are windows of both modes enough."""
        return len(self._plain) == len(self._round) == MEMORY

    def round_cost(self, k: int) -> float:
        """Time of a round with ``k`` drafted tokens asked for, in plain tokens."""
        return self._round_cost * (1.0 + TOKEN * k)

    def record(self, num_sessions: int, cycle_ns: int, num_tokens: int, num_asked: int, now_ns: int) -> bool:
        """One of ``num_sessions`` took ``cycle_ns`` for a round with ``num_asked`` drafted tokens, or for
        ``num_tokens`` plain ones. Return whether a window is over.
        """
        self._ns += cycle_ns
        self._num_verdicts += 1
        if num_asked:
            self._round_ns += cycle_ns
            self._num_rounds += 1
            self._num_asked += num_asked
        else:
            self._num_plain += num_tokens
        if self.is_measured:
            is_steady = (2 * self._round_ns > self._ns) is self._was_rounds
            window_ns = (STEADY_WINDOWS if is_steady else 1) * WINDOW_NS
            is_over = self._ns >= window_ns * num_sessions and self._num_verdicts >= WINDOW_VERDICTS * num_sessions
        else:
            is_over = self._num_verdicts >= 2 * WINDOW_VERDICTS * num_sessions
        if is_over:
            self._close(now_ns)
        return is_over

    def _close(self, now_ns: int) -> None:
        share, known_ns = self._round_ns / self._ns, self.plain_ns
        if share <= 1.0 - PURE and self._num_plain:
            rounds_ns = (self._num_rounds + TOKEN * self._num_asked) * self._round_cost * known_ns
            self._plain.append(max(self._ns - rounds_ns, 0.5 * self._ns) / self._num_plain)
            self.plain_at_ns, self._was_rounds = now_ns, False
        elif share >= PURE and known_ns:
            rounds_ns = max(self._ns - self._num_plain * known_ns, 0.5 * self._ns)
            self._round.append(rounds_ns / (self._num_rounds + TOKEN * self._num_asked))
            self.round_at_ns, self._was_rounds = now_ns, True
        self.plain_ns = median(self._plain) if self._plain else 0.0
        if self._round and self._plain:
            self._round_cost = median(self._round) / self.plain_ns
        self._clear()

    def _clear(self) -> None:
        self._ns = self._round_ns = 0
        self._num_verdicts = self._num_plain = self._num_rounds = self._num_asked = 0
