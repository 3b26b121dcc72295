"""What a step of a target costs: time as a function of its rows, its sessions and their context, learned online."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

#: Steps a bucket remembers: newer ones replace older ones with this weight at least.
MEMORY: Final = 32
#: A step that took longer than this many times the usual counts as this many times the usual.
OUTLIER: Final = 3.0
#: Up to this many rows each count is a bucket of its own; beyond, two buckets for each doubling.
EXACT_ROWS: Final = 8
#: Relative growth of the time when rows double, assumed beyond the only row count ever seen.
GROWTH: Final = 0.02
#: Cache entries that count as one unit while slopes are learned.
CONTEXT_UNIT: Final = 1000.0
#: Share of a step's time that sessions and context may explain; the rest is the rows'.
MAX_EXPLAINED: Final = 0.8
#: How fast the evidence for the slopes fades, per step.
FADE: Final = 0.995


class _Bucket:
    """The steps of about so many rows: fading means."""

    __slots__ = ("_first", "context", "count", "ns", "rows", "sessions")

    def __init__(self) -> None:
        self.count = 0
        self.rows = self.sessions = self.context = self.ns = 0.0
        self._first: list[float] = []

    def add(self, rows: float, sessions: float, context: float, ns: float) -> None:
        self.count += 1
        weight = max(2.0 / (self.count + 1), 1.0 / MEMORY)  # what was learned first, cold, is outvoted soon
        self.rows += (rows - self.rows) * weight
        self.sessions += (sessions - self.sessions) * weight
        self.context += (context - self.context) * weight
        if self.count <= 3:
            # The first step of its kind may be anything (a cold cache, a compilation): the median stands for it.
            self._first.append(ns)
            self.ns = sorted(self._first)[(self.count - 1) // 2]
        else:
            # Steps are slow by accident, never fast: a much faster one shows that the others were accidents.
            weight = max(weight, 0.5) if ns < 0.5 * self.ns else weight
            self.ns += (min(ns, OUTLIER * self.ns) - self.ns) * weight


class StepCost:
    """Time of a step as ``curve(rows) + s · sessions + c · context``.

    The curve is piecewise linear through the means of buckets of rows, made non-decreasing (pool adjacent violators):
    on a CPU the time may be flat up to a knee and steep beyond, on a GPU it has steps, and a polynomial would fit
    neither. A bucket forgets only when its own row count is seen again, so what plain decoding costs is not forgotten
    while every round speculates. ``s`` and ``c`` are never negative; they are learned from the differences inside
    buckets.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._curve: list[tuple[float, float]] | None = None
        #: Fading sums over steps: their number, and products of the deviations from their buckets' means.
        self._n = self._yy = self._ss = self._cc = self._sc = self._sy = self._cy = 0.0
        self._slopes = (0.0, 0.0)
        #: Steps observed.
        self.num_steps = 0

    def observe(self, rows: int, sessions: int, context: int, ns: float) -> None:
        """A step of ``rows`` rows for ``sessions`` sessions with ``context`` cache entries in all took ``ns``."""
        rows = max(rows, 1)
        self.num_steps += 1
        bucket = self._buckets.setdefault(_bucket_of(rows), _Bucket())
        if bucket.count > 3 and ns < OUTLIER * bucket.ns:
            self._learn_slopes(bucket, rows, sessions, context, ns)
        bucket.add(rows, sessions, context, ns)
        self._curve = None

    def predict(self, rows: float, sessions: float, context: float) -> float:
        """Nanoseconds a step is expected to take; 0 while none was observed."""
        curve = self._fitted()
        if not curve:
            return 0.0
        s, c = self._slopes
        return max(_at(curve, rows) + s * sessions + c * context, 0.1 * curve[0][1], 1.0)

    def _learn_slopes(self, bucket: _Bucket, rows: float, sessions: float, context: float, ns: float) -> None:
        if abs(rows - bucket.rows) > 0.1 * bucket.rows:
            return  # the difference may be the rows'
        ds, dc, dy = sessions - bucket.sessions, (context - bucket.context) / CONTEXT_UNIT, ns - bucket.ns
        self._n = FADE * self._n + 1.0
        self._yy = FADE * self._yy + dy * dy
        self._ss = FADE * self._ss + ds * ds
        self._cc = FADE * self._cc + dc * dc
        self._sc = FADE * self._sc + ds * dc
        self._sy = FADE * self._sy + ds * dy
        self._cy = FADE * self._cy + dc * dy

    def _fitted(self) -> list[tuple[float, float]]:
        """The curve: (rows, nanoseconds without the sessions' and context's share), both increasing."""
        if self._curve is None:
            self._slopes = s, c = self._solve()
            buckets = sorted(self._buckets.values(), key=lambda bucket: bucket.rows)
            self._curve = _non_decreasing(
                [(b.rows, b.ns - s * b.sessions - c * b.context, float(min(b.count, MEMORY))) for b in buckets]
            )
        return self._curve

    def _solve(self) -> tuple[float, float]:
        """Both slopes by least squares, each less two standard errors and not below 0: what is not evident is 0."""
        if self._n < MEMORY:
            return 0.0, 0.0
        noise = 2.0 * math.sqrt(self._yy / self._n)
        s = c = 0.0
        for _ in range(8):  # coordinate descent on two variables
            if self._ss > 0.0:
                s = max(0.0, (self._sy - c * self._sc - noise * math.sqrt(self._ss)) / self._ss)
            if self._cc > 0.0:
                c = max(0.0, (self._cy - s * self._sc - noise * math.sqrt(self._cc)) / self._cc)
        c /= CONTEXT_UNIT
        # A step's rows always cost something: together the slopes explain no more than this share of any bucket.
        shares = [(s * b.sessions + c * b.context) / b.ns for b in self._buckets.values() if b.ns > 0.0]
        excess = max(shares, default=0.0) / MAX_EXPLAINED
        return (s / excess, c / excess) if excess > 1.0 else (s, c)


def _bucket_of(rows: int) -> int:
    return rows if rows <= EXACT_ROWS else EXACT_ROWS + round(2.0 * math.log2(rows / EXACT_ROWS))


def _non_decreasing(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Weighted isotonic regression of (x, y, weight), sorted by x, by pooling adjacent violators."""
    pools: list[list[tuple[float, float, float]]] = []
    levels: list[float] = []
    for point in points:
        pools.append([point])
        levels.append(point[1])
        while len(levels) > 1 and levels[-2] > levels[-1]:
            last = pools.pop()
            pools[-1] += last
            levels.pop()
            levels[-1] = sum(y * w for _, y, w in pools[-1]) / sum(w for _, _, w in pools[-1])
    return [(x, level) for pool, level in zip(pools, levels, strict=True) for x, _, _ in pool]


def _at(curve: Sequence[tuple[float, float]], rows: float) -> float:
    """The curve at ``rows``; beyond its ends the nearest slope continues.

    To the left of the first point the value is at least the straight line to 0 and, where the first point is the only
    one, that line: what was never tried looks good, so that it is tried.
    """
    x0, y0 = curve[0]
    if len(curve) == 1:
        return y0 * rows / x0 if rows <= x0 else y0 * (1.0 + GROWTH * (rows / x0 - 1.0))
    if rows <= x0:
        x1, y1 = curve[1]
        return max(y0 - (x0 - rows) * (y1 - y0) / max(x1 - x0, 1e-9), y0 * rows / x0)
    for (xa, ya), (xb, yb) in pairwise(curve):
        if rows <= xb:
            return ya + (rows - xa) * (yb - ya) / max(xb - xa, 1e-9)
    (xa, ya), (xb, yb) = curve[-2:]
    return yb + (rows - xb) * (yb - ya) / max(xb - xa, 1e-9)
