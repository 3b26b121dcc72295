"""What speculation can give, from the acceptance rate and the relative costs; and summaries of measurements.

α is the probability that a drafted token is accepted given that those before it were, k the drafted tokens a round,
c = draft step / target step, d = (network + serialisation of a round) / target step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def tokens_per_round(alpha: float, k: int) -> float:
    """Expected tokens a round commits: (1 − α^(k+1)) / (1 − α) (Leviathan et al. 2023, eq. 1)."""
    if alpha >= 1.0:
        return k + 1.0
    return float((1.0 - alpha ** (k + 1)) / (1.0 - alpha))


def serial_limit(alpha: float, k: int, c: float, d: float) -> float:
    """Speed over plain decoding when drafting, network and verification follow each other."""
    return tokens_per_round(alpha, k) / (1.0 + k * c + d)


def overlapped_limit(alpha: float, k: int, c: float, d: float) -> float:
    """The same when drafting and network are hidden behind verification, as far as they fit there."""
    return tokens_per_round(alpha, k) / max(1.0, k * c + d)


@dataclass(frozen=True, slots=True)
class Limits:
    """The best speed over plain decoding with any number of drafts up to k.

    ``serial`` and ``overlapped`` take verification for the price of one target step, as it is while reading the
    weights is all that counts; ``priced`` is the overlapped limit at the price that was measured.
    """

    serial: float
    overlapped: float
    priced: float

    @classmethod
    def of(cls, alpha: float, k: int, c: float, d: float, verify_ratio: float) -> Limits:
        """The limits; the price of fewer drafts is interpolated between one step and that of k drafts."""
        counts = range(1, k + 1)
        prices = {j: 1.0 + (max(verify_ratio, 1.0) - 1.0) * j / k for j in counts}
        return cls(
            serial=max(1.0, *(serial_limit(alpha, j, c, d) for j in counts)),
            overlapped=max(1.0, *(overlapped_limit(alpha, j, c, d) for j in counts)),
            priced=max(1.0, *(tokens_per_round(alpha, j) / max(prices[j], j * c + d) for j in counts)),
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75))

    def show(self, digits: int = 1) -> str:
        """``median (low–high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of ratios, the quartiles around it, and its standard error."""

    spread: Spread
    error: float

    @classmethod
    def of(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
        """Ratios of windows next to each other.

        The error is that of the median of normal values, sqrt(pi / 2) times that of their mean; their deviation is
        taken from the quartiles, which one bad window does not move.
        """
        ratios = [one / max(other, 1e-9) for one, other in zip(numerators, denominators, strict=True)]
        spread = Spread.of(ratios)
        deviation = (spread.high - spread.low) / 1.349
        return cls(spread, math.sqrt(math.pi / 2.0 / len(ratios)) * deviation)

    def show(self) -> str:
        """``median ± error``."""
        return f"{self.spread.median:.3f} ± {self.error:.3f}"

    @property
    def quartiles(self) -> str:
        """``low–high``."""
        return f"{self.spread.low:.2f}–{self.spread.high:.2f}"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the others lie, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
