"""What speculation may lose: an account that bounds the time by which it is ever slower than plain decoding."""

from __future__ import annotations

from typing import Final

#: Share of the time that may be lost to rounds and measurements that turn out slower than the alternative.
ALLOWED_LOSS: Final = 0.01
#: Savings and debts end here, in plain cycles of each session.
MAX_SAVINGS: Final = 24.0
MAX_DEBT: Final = 8.0
#: Savings from which speculation goes on after the account was overdrawn, in the same unit; granted once for every
#: number of sessions (within a factor of 2) that was never there before.
FRESH_START: Final = 3.0
#: Savings from which something may be tried, in the same unit.
ENOUGH: Final = 6.0


class Allowance:
    """Every cycle of a session earns a small share of its time; cycles that were slower than plain ones spend it.

    Cycles that were faster fill it up again. While it is overdrawn nobody speculates, so in the long run speculation
    loses no more than the share that is earned, whatever the models promised.
    """

    def __init__(self) -> None:
        #: Nanoseconds of sessions that may still be lost.
        self.savings_ns = 0.0
        #: Whether too much was lost, and has to be earned again.
        self.overdrawn = False
        #: Whether there is enough to try something that may lose.
        self.suffices = False
        self._loads: set[int] = set()

    def book(self, spent_ns: float, lost_ns: float, num_sessions: int, plain_cycle_ns: float) -> None:
        """A session spent ``spent_ns``, of which the better alternative would have saved ``lost_ns``; below 0: gained.

        ``plain_cycle_ns``: what a token takes each of ``num_sessions`` while nobody speculates.
        """
        unit_ns = plain_cycle_ns * num_sessions
        savings_ns = self.savings_ns + ALLOWED_LOSS * spent_ns - lost_ns
        if (load := num_sessions.bit_length()) not in self._loads:
            self._loads.add(load)
            self.overdrawn, savings_ns = False, max(savings_ns, FRESH_START * unit_ns)
        self.savings_ns = min(max(savings_ns, -MAX_DEBT * unit_ns), MAX_SAVINGS * unit_ns)
        self.overdrawn = self.savings_ns < (FRESH_START * unit_ns if self.overdrawn else 0.0)
        self.suffices = self.savings_ns >= ENOUGH * unit_ns
