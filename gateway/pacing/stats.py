"""What pacing did on one target since the start, counted; and how Prometheus gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class Mode(StrEnum):
    """How a session decodes."""

    PLAIN = "plain"
    SPECULATIVE = "speculative"


@dataclass(slots=True)
class PacingStats:
    """Counts of one target's sessions that may speculate."""

    #: Verdicts by mode.
    num_verdicts: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    #: Drafted tokens that were asked for.
    num_draft_tokens: int = 0
    #: Trials ended, by the mode that was tried.
    num_trials: dict[Mode, int] = field(default_factory=lambda: dict.fromkeys(Mode, 0))
    #: Seconds that trials took; and seconds with a session open.
    trial_s: float = 0.0
    busy_s: float = 0.0


class PacingStatsCollector(Collector):
    """The counts of all targets, read when Prometheus asks."""

    def __init__(self, stats: Callable[[], Mapping[str, PacingStats]]) -> None:
        """``stats`` gives them by the names of their targets."""
        self._stats = stats

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The metrics of this moment."""
        verdicts = CounterMetricFamily(
            "tandem_pacing_verdicts", "Verdicts of sessions that may speculate", labels=("target", "mode")
        )
        tokens = CounterMetricFamily("tandem_pacing_draft_tokens", "Drafted tokens asked for", labels=("target",))
        trials = CounterMetricFamily(
            "tandem_pacing_trials", "Trials of the mode that was not measured last", labels=("target", "mode")
        )
        tried = CounterMetricFamily("tandem_pacing_trial_seconds", "Seconds that trials took", labels=("target",))
        busy = CounterMetricFamily("tandem_pacing_busy_seconds", "Seconds with a session open", labels=("target",))
        for name, stats in self._stats().items():
            for mode in Mode:
                verdicts.add_metric((name, mode), stats.num_verdicts[mode])
                trials.add_metric((name, mode), stats.num_trials[mode])
            tokens.add_metric((name,), stats.num_draft_tokens)
            tried.add_metric((name,), stats.trial_s)
            busy.add_metric((name,), stats.busy_s)
        return verdicts, tokens, trials, tried, busy
