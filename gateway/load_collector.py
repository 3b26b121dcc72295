"""How full the gateway and its replicas are, for Prometheus; some of it under vLLM's names, which routers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing import Router


class LoadCollector(Collector):
    """Gauges that are read when Prometheus asks."""

    def __init__(
        self,
        router: Router,
        *,
        model_name: Callable[[], str],
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
    ) -> None:
        """``num_running`` and ``num_waiting``: sequences in progress here, and requests that wait for that."""
        self._router = router
        self._model_name = model_name
        self._num_running = num_running
        self._num_waiting = num_waiting

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The metrics of this moment."""
        busy_share = GaugeMetricFamily(
            "tandem_draft_busy_share",
            "Share of its time that a draft computes what sessions wait for",
            labels=("draft",),
        )
        for draft in self._router.drafts.usable:
            busy_share.add_metric((draft.name,), draft.busy_share)
        kv_use = GaugeMetricFamily(
            "tandem_target_kv_use", "Share of a target's KV cache that open sessions use", labels=("target",)
        )
        targets = self._router.targets.usable
        uses = {target.name: min(1.0, target.kv_use) for target in targets}
        for name, use in uses.items():
            kv_use.add_metric((name,), use)
        mean_use = sum(uses.values()) / max(len(uses), 1)
        return (
            busy_share,
            kv_use,
            self._under_vllms_name("num_requests_running", "Sequences in progress", self._num_running()),
            self._under_vllms_name("num_requests_waiting", "Requests that wait for a slot", self._num_waiting()),
            self._under_vllms_name("kv_cache_usage_perc", "Mean of tandem_target_kv_use", mean_use),
        )

    def _under_vllms_name(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name",))
        gauge.add_metric((self._model_name(),), value)
        return gauge
