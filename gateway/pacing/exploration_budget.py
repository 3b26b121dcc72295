"""What looking for the faster way may cost: an account that bounds the time lost by it."""

from __future__ import annotations

from typing import Final

#: Share of the time that may be lost to probes and to turns of the way that turns out slower.
ALLOWED_LOSS: Final = 0.01
#: Savings and debts end here.
MAX_SAVINGS: Final = 6.0
MAX_DEBT: Final = 24.0


class ExplorationBudget:
    """Every cycle earns a small share of its time; what is slower than the leading way spends it.

    In the contest's units of time, of every session: what many sessions have lost is not a debt of few.
    """

    def __init__(self) -> None:
        #: What may still be lost.
        self.savings = 0.0

    def book(self, spent: float, lost: float) -> None:
        """A time of ``spent`` passed, of which the leading way would have saved ``lost``; below 0: gained."""
        self.savings = min(max(self.savings + ALLOWED_LOSS * spent - lost, -MAX_DEBT), MAX_SAVINGS)
