"""Why a window was as fast as it was: what pacing did in it, and how busy the services were."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.counts import Counts

if TYPE_CHECKING:
    from tandem.bench.systems import System

_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport(Counts):
    """What happened in some windows with speculation on."""

    #: Length of the windows in seconds.
    wall_s: float = 0.0
    #: Verdicts of rounds with drafted tokens and of others, and drafted tokens that were asked for.
    rounds: float = 0.0
    plain: float = 0.0
    draft_tokens: float = 0.0
    #: Trials of speculation and of plain decoding, and the seconds they lost by the gateway's estimate.
    speculative_trials: float = 0.0
    plain_trials: float = 0.0
    lost_s: float = 0.0
    #: Seconds the services computed.
    target_s: float = 0.0
    draft_s: float = 0.0

    @property
    def drafted_share(self) -> float:
        """Share of the verdicts that were rounds with drafted tokens."""
        return self.rounds / max(self.rounds + self.plain, 1.0)

    @property
    def mean_k(self) -> float:
        """Drafted tokens asked for in such a round."""
        return self.draft_tokens / max(self.rounds, 1.0)

    def show(self) -> str:
        """One line."""
        wall_s = max(self.wall_s, 1e-9)
        return (
            f"{self.drafted_share:.0%} of rounds drafted, k {self.mean_k:.1f}; {self.speculative_trials:.0f} trials of"
            f" speculation, {self.plain_trials:.0f} of plain decoding lost {self.lost_s / wall_s:.1%};"
            f" target {self.target_s / wall_s:.0%}, draft {self.draft_s / wall_s:.0%} busy"
        )


async def read_report(system: System) -> WindowReport:
    """What was counted since the services started; zeros for a system without metrics."""
    url, router = getattr(system, "url", None), getattr(system, "router", None)
    if url is None or router is None:
        return WindowReport()
    target = await router.targets.usable[0].backend.load()
    drafts = [await replica.backend.load() for replica in router.drafts.usable]
    text = await asyncio.to_thread(_read, f"{url}/metrics")
    return WindowReport(
        wall_s=time.perf_counter(),
        target_s=target.busy_ns / 1e9,
        draft_s=sum(load.busy_ns for load in drafts) / 1e9,
        **counted(text_string_to_metric_families(text)),
    )


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


#: Field → name of the sample and, where it has one, value of its label ``mode``.
_SAMPLES: Final[Mapping[str, tuple[str, str | None]]] = {
    "rounds": ("tandem_pacing_verdicts_total", "speculative"),
    "plain": ("tandem_pacing_verdicts_total", "plain"),
    "draft_tokens": ("tandem_pacing_draft_tokens_total", None),
    "speculative_trials": ("tandem_pacing_trials_total", "speculative"),
    "plain_trials": ("tandem_pacing_trials_total", "plain"),
    "lost_s": ("tandem_pacing_trial_loss_seconds_total", None),
}


def counted(families: Iterable[Any]) -> dict[str, float]:
    """The fields of :class:`WindowReport` that a gateway's metrics hold."""
    values = dict.fromkeys(_SAMPLES, 0.0)
    for family in families:
        for sample in family.samples:
            for name, (wanted, mode) in _SAMPLES.items():
                if sample.name == wanted and mode in (None, sample.labels.get("mode")):
                    values[name] += sample.value
    return values
