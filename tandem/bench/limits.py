"""What speculation can give, from the acceptance rate and the relative costs.

α is the probability that a drafted token is accepted given that those before it were, k the drafted tokens a round,
c = draft step / target step, d = (network + serialisation of a round) / target step.
"""

from __future__ import annotations

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


def acceptance_per_token(histogram: Sequence[int], k: int) -> float:
    """α from rounds that accepted 0, 1, … tokens: accepted / (accepted + rounds that ended with a rejection).

    Rounds that accepted all k had no rejection; shorter proposals (at the end of a text) count as rejected, which
    makes the number a little too small rather than too large.
    """
    accepted = sum(count * rounds for count, rounds in enumerate(histogram))
    rejections = sum(rounds for count, rounds in enumerate(histogram) if count < k)
    return accepted / (accepted + rejections) if accepted + rejections else 0.0


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


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the others lie, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
