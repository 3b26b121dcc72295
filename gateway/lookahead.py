"""Whether drafting ahead of verdicts pays here: measured against drafting in turns, while serving.

It hides the draft's work and the way to it behind the target's work. Where the two share a machine's cores the target
gets slower by it, perhaps by more than is hidden. No model tells beforehand, so both are tried in short turns on the
same sessions, and what wins stays on until the next comparison.

Legal under every rule: the choice depends on the times of past rounds only. It cannot change a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

#: Proposals ahead of each verdict where it pays. More of them are rarely right, and cost as much.
FEW: Final = 4
#: A comparison is so many turns of each way, alternating; a turn is so many rounds of each session.
TURNS: Final = 3
TURN_ROUNDS: Final = 12
#: A round that took so many times the median of its turn is left out: prompts of others, hiccups of the machine. No
#: more than that, for hits and misses are far apart, too, and both belong to the mean.
HICCUP: Final = 3.0
#: Drafting ahead takes power and the draft's time from others; it must be faster by this share to be on.
MARGIN: Final = 0.02
#: Rounds of each session between two comparisons; doubled while they agree, up to the second.
FIRST_PAUSE: Final = 256
LAST_PAUSE: Final = 4096
#: Weight of the latest comparison among those with as many sessions.
NEWEST: Final = 0.5


@dataclass(slots=True)
class Comparison:
    """Turns of both ways, and how long their rounds took."""

    #: The way of the first turn.
    first: bool
    rounds_ns: list[list[int]] = field(default_factory=lambda: [[]])

    @property
    def ahead(self) -> bool:
        """Whether the turn under way drafts ahead."""
        return self.first is (len(self.rounds_ns) % 2 == 1)

    @property
    def is_complete(self) -> bool:
        """Whether all turns are over."""
        return len(self.rounds_ns) > 2 * TURNS

    def log_ratio(self) -> float:
        """Logarithm of the time of a round with drafting ahead over that without: the mean over pairs of turns."""
        means = [_mean(turn) for turn in self.rounds_ns[: 2 * TURNS]]
        pairs = zip(means[::2], means[1::2], strict=True)
        mean = sum(math.log(one / other) for one, other in pairs) / TURNS
        return mean if self.first else -mean


@dataclass(slots=True)
class Standing:
    """What comparisons at one load have shown so far."""

    #: Logarithm of the time of a round with drafting ahead over that without; None before the first comparison.
    log_ratio: float | None = None
    pause: int = FIRST_PAUSE
    #: Rounds left until the next comparison.
    rounds_left: int = 0
    #: The one under way.
    comparison: Comparison | None = None

    @property
    def ahead(self) -> bool:
        """Whether to draft ahead now."""
        if self.comparison is not None:
            return self.comparison.ahead
        return self.wins

    @property
    def wins(self) -> bool:
        """Whether drafting ahead was faster."""
        return self.log_ratio is None or self.log_ratio < -MARGIN

    def learn(self, log_ratio: float) -> None:
        """Add a comparison."""
        before = self.log_ratio
        self.log_ratio = log_ratio if before is None else before + NEWEST * (log_ratio - before)
        agrees = before is not None and (before < -MARGIN) == (log_ratio < -MARGIN)
        self.pause = min(2 * self.pause, LAST_PAUSE) if agrees else FIRST_PAUSE


class Lookahead:
    """How many proposals a draft may send ahead of a verdict. One for all sessions of a gateway.

    Loads are told apart by the number of sessions, within a factor of 2.
    """

    def __init__(self, num_ahead: int | None) -> None:
        """``num_ahead``: proposals ahead of each verdict, always; None: none or a few, whatever is faster."""
        self._most = FEW if num_ahead is None else num_ahead
        self._measures = num_ahead is None
        self._standings: dict[int, Standing] = {}
        self._load = 0
        #: Counts the turns, the stretches between comparisons and the changes of the load.
        self.turn = 0

    def num_ahead(self) -> int:
        """Proposals the draft may send ahead of the next verdict."""
        standing = self._standings.get(self._load)
        return self._most if standing is None or standing.ahead else 0

    def record(self, cycle_ns: int, num_sessions: int, turn: int) -> None:
        """A round took ``cycle_ns`` from verdict to verdict, while so many sessions were open.

        ``turn``: what :attr:`turn` was when the draft was asked for the round before it, for that is when it began to
        draft ahead for this one; rounds of two turns are not typical of either.
        """
        if not self._measures:
            return
        if (load := num_sessions.bit_length()) != self._load:
            self._load = load
            self.turn += 1
        standing = self._standings.setdefault(load, Standing())
        if standing.comparison is None:
            standing.rounds_left -= 1
            if standing.rounds_left < 0:
                standing.comparison = Comparison(standing.wins)
                self.turn += 1
        elif turn == self.turn:
            self._count(standing.comparison, standing, cycle_ns, num_sessions)

    def _count(self, comparison: Comparison, standing: Standing, cycle_ns: int, num_sessions: int) -> None:
        comparison.rounds_ns[-1].append(cycle_ns)
        if len(comparison.rounds_ns[-1]) < TURN_ROUNDS * num_sessions:
            return
        comparison.rounds_ns.append([])
        if comparison.is_complete:
            standing.learn(comparison.log_ratio())
            standing.rounds_left = standing.pause * num_sessions
            standing.comparison = None
        self.turn += 1


def _mean(values: Sequence[int]) -> float:
    longest = HICCUP * median(values)
    return max(fmean(value for value in values if value <= longest), 1.0)
