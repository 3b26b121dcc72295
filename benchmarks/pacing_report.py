"""Why a window was as fast as it was: what pacing did meanwhile, and how busy the services were."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Self

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tandem.bench.systems import System

_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What happened in some windows with speculation on."""

    #: Length of the windows in seconds.
    wall_s: float = 0.0
    #: Verdicts of rounds with drafted tokens and of others, and drafted tokens that were asked for.
    rounds: float = 0.0
    plain: float = 0.0
    draft_tokens: float = 0.0
    #: Probes, trials and checks begun.
    probes: float = 0.0
    trials: float = 0.0
    checks: float = 0.0
    #: Session seconds that experiments lost, in the account's view; below 0: gained. And those of all cycles.
    lost_s: float = 0.0
    spent_s: float = 0.0
    #: Seconds the services computed.
    target_s: float = 0.0
    draft_s: float = 0.0
    #: The account at the end, in plain cycles of every session.
    savings: float = 0.0

    @property
    def drafted_share(self) -> float:
        """Share of the verdicts that were rounds with drafted tokens."""
        return self.rounds / max(self.rounds + self.plain, 1.0)

    @property
    def mean_k(self) -> float:
        """Drafted tokens asked for in such a round."""
        return self.draft_tokens / max(self.rounds, 1.0)

    def since(self, before: Self) -> Self:
        """What happened from ``before`` to now, both counted since the start."""
        return self._with(before, -1.0)

    def plus(self, other: Self) -> Self:
        """Two windows together; the account is that of ``other``."""
        return self._with(other, 1.0)

    def _with(self, other: Self, sign: float) -> Self:
        values = {each.name: getattr(self, each.name) + sign * getattr(other, each.name) for each in fields(self)}
        return type(self)(**(values | {"savings": other.savings if sign > 0 else self.savings}))

    def show(self) -> str:
        """One line."""
        wall_s = max(self.wall_s, 1e-9)
        return (
            f"{self.drafted_share:.0%} of rounds drafted, k {self.mean_k:.1f}; {self.probes:.0f} probes,"
            f" {self.trials:.0f} trials, {self.checks:.0f} checks lost {self.lost_s / max(self.spent_s, 1e-9):.1%};"
            f" account {self.savings:.1f}; target {self.target_s / wall_s:.0%}, draft {self.draft_s / wall_s:.0%} busy"
        )


async def look(system: System) -> Reasons:
    """What was counted since the services started; zeros for a system that tells nothing."""
    url, router = getattr(system, "url", None), getattr(system, "router", None)
    if url is None or router is None:
        return Reasons()
    target = await router.targets.usable[0].backend.load()
    drafts = [await replica.backend.load() for replica in router.drafts.usable]
    text = await asyncio.to_thread(_read, f"{url}/metrics")
    return Reasons(
        wall_s=time.perf_counter(),
        target_s=target.busy_ns / 1e9,
        draft_s=sum(load.busy_ns for load in drafts) / 1e9,
        **counted(text_string_to_metric_families(text)),
    )


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        return str(answer.read(), "utf-8")


#: Field → name of the sample and, where it has one, value of its label.
_SAMPLES: Final[Mapping[str, tuple[str, str | None]]] = {
    "rounds": ("tandem_pacing_verdicts_total", "round"),
    "plain": ("tandem_pacing_verdicts_total", "plain"),
    "draft_tokens": ("tandem_pacing_draft_tokens_total", None),
    "probes": ("tandem_pacing_begun_total", "probe"),
    "trials": ("tandem_pacing_begun_total", "trial"),
    "checks": ("tandem_pacing_begun_total", "check"),
    "savings": ("tandem_pacing_savings_cycles", None),
    "spent_s": ("tandem_pacing_spent_seconds_total", None),
}
_EXPERIMENTS: Final = ("probe", "trial", "check")


def counted(families: Iterable[Any]) -> dict[str, float]:
    """The fields of :class:`Reasons` that a gateway's metrics tell."""
    values = dict.fromkeys((*_SAMPLES, "lost_s"), 0.0)
    for family in families:
        for sample in family.samples:
            label = sample.labels.get("kind") or sample.labels.get("activity")
            for name, (wanted, value) in _SAMPLES.items():
                if sample.name == wanted and value in (None, label):
                    values[name] += sample.value
            if sample.name == "tandem_pacing_lost_seconds" and label in _EXPERIMENTS:
                values["lost_s"] += sample.value
    return values
