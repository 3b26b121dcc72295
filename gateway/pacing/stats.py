"""What pacing did on one target since the start, counted; and how it is told to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class Activity(StrEnum):
    """What the sessions of a target are doing, as far as it may be slower than plain decoding."""

    #: Nobody drafts, nobody has just drafted.
    PLAIN = "plain"
    #: A session looks how much is accepted.
    PROBE = "probe"
    #: All sessions draft for a moment to see how long it takes.
    TRIAL = "trial"
    #: All sessions decode plainly for a moment, to see how long that takes, although speculation pays.
    CHECK = "check"
    SPECULATION = "speculation"


@dataclass(slots=True)
class PacingStats:
    """Counts of one target's sessions that may speculate."""

    #: Verdicts of rounds with drafted tokens, and of multi-step tokens.
    num_rounds: int = 0
    num_plain: int = 0
    #: Drafted tokens that were asked for.
    num_draft_tokens: int = 0
    #: Times an activity began.
    begun: dict[Activity, int] = field(default_factory=lambda: dict.fromkeys(Activity, 0))
    #: Nanoseconds of sessions that an activity lost against the better alternative; below 0: gained.
    lost_ns: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    #: Nanoseconds of sessions it lasted.
    spent_ns: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    #: What may still be lost, in units of every session.
    savings: float = 0.0


class Counted(Protocol):
    """A lane, as far as it is told of."""

    @property
    def tally(self) -> PacingStats:
        """Its counts."""
        ...


class PacingStatsCollector(Collector):
    """The tallies of all targets, read when they are asked for."""

    def __init__(self, lanes: Callable[[], Mapping[str, Counted]]) -> None:
        """``lanes`` gives them by the names of their targets."""
        self._lanes = lanes

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """The metrics of this moment."""
        verdicts = CounterMetricFamily(
            "tandem_pacing_verdicts", "Verdicts of sessions that may speculate", labels=("target", "kind")
        )
        tokens = CounterMetricFamily("tandem_pacing_draft_tokens", "Drafted tokens asked for", labels=("target",))
        begun = CounterMetricFamily(
            "tandem_pacing_begun", "Probes, trials and checks begun", labels=("target", "activity")
        )
        lost = GaugeMetricFamily(
            "tandem_pacing_lost_seconds",
            "Session time lost against the better alternative since the start; below 0: gained",
            labels=("target", "activity"),
        )
        spent = CounterMetricFamily(
            "tandem_pacing_spent_seconds", "Session time spent with an activity", labels=("target", "activity")
        )
        savings = GaugeMetricFamily(
            "tandem_pacing_savings_cycles",
            "What may still be lost by looking for the faster way, in cycles of every session",
            labels=("target",),
        )
        for name, lane in self._lanes().items():
            tally = lane.tally
            verdicts.add_metric((name, "round"), tally.num_rounds)
            verdicts.add_metric((name, "plain"), tally.num_plain)
            tokens.add_metric((name,), tally.num_draft_tokens)
            for activity in Activity:
                begun.add_metric((name, activity), tally.begun[activity])
                lost.add_metric((name, activity), tally.lost_ns[activity] / 1e9)
                spent.add_metric((name, activity), tally.spent_ns[activity] / 1e9)
            savings.add_metric((name,), tally.savings)
        return verdicts, tokens, begun, lost, spent, savings
