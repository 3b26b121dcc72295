"""How full the gateway and its replicas are, for Prometheus; some of it under vLLM's names, which routers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from gateway.placement.routing import Pool, Replica, Router


class LoadCollector(Collector):
    """Gauges that are read when Prometheus asks. What replicas tell is a second old at most."""

    def __init__(
        self,
        router: Router,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        has_engines: bool = False,
    ) -> None:
        """``num_running`` and ``num_waiting``: sequences in progress here, and requests that wait for that.
        ``has_engines``: the targets are engines, which may preempt.
        """
        self._router = router
        self._num_running = num_running
        self._num_waiting = num_waiting
        self._has_engines = has_engines

    def collect(self) -> Iterable[MetricFamily]:
        """The metrics of this moment."""
        targets, drafts = self._router.targets, self._router.drafts
        num_running, num_waiting = self._num_running(), self._num_waiting()
        num_waiting_there = sum(target.load.waiting_sessions for target in targets.usable)
        uses = [_kv_use(target) for target in targets.usable]
        yield GaugeMetricFamily("tandem_requests_waiting", "Requests that wait for the gateway's limit", num_waiting)
        yield _up("target", targets)
        yield _of_each("target_kv_use", "Share of a target's KV cache that open sessions use", targets, _kv_use)
        yield _sessions("target", targets)
        yield _up("draft", drafts)
        yield _of_each(
            "draft_busy_share", "Share of its time that a draft computes what sessions wait for", drafts,
            lambda draft: draft.busy_share,
        )  # fmt: skip
        yield _sessions("draft", drafts)
        # A sequence that waits on a target is in progress here.
        yield GaugeMetricFamily(
            "vllm:num_requests_running", "Sequences in progress", max(0, num_running - num_waiting_there)
        )
        yield GaugeMetricFamily(
            "vllm:num_requests_waiting", "Requests that wait here or on a target", num_waiting + num_waiting_there
        )
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Mean of tandem_target_kv_use", sum(uses) / max(len(uses), 1)
        )
        if not self._has_engines:
            yield CounterMetricFamily(
                "vllm:num_preemptions",
                "Times that sessions lost their KV blocks to others and were fed again",
                sum(target.load.preemptions for target in targets.usable),
            )


def _kv_use(target: Replica[Any]) -> float:
    return min(1.0, target.kv_use)


def _up(role: str, pool: Pool[Any]) -> GaugeMetricFamily:
    up = GaugeMetricFamily(f"tandem_{role}_up", f"1: the {role} can be used; 0: it cannot", labels=(role,))
    for replica in pool.replicas:
        up.add_metric((replica.name,), replica.usable)
    return up


def _sessions(role: str, pool: Pool[Any]) -> GaugeMetricFamily:
    sessions = GaugeMetricFamily(
        f"tandem_{role}_sessions", f"Sessions of a {role}, those of other gateways included", labels=(role, "state")
    )
    for replica in pool.usable:
        load = replica.load
        counts = {"open": load.open_sessions, "waiting": load.waiting_sessions}
        for state, count in counts.items():
            sessions.add_metric((replica.name, state), count)
    return sessions


def _of_each(name: str, text: str, pool: Pool[Any], value: Callable[[Replica[Any]], float]) -> GaugeMetricFamily:
    """A gauge of each replica that can be used, with the label of its role."""
    gauge = GaugeMetricFamily(f"tandem_{name}", text, labels=(name.partition("_")[0],))
    for replica in pool.usable:
        gauge.add_metric((replica.name,), value(replica))
    return gauge
