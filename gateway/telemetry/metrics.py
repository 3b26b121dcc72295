"""Prometheus metrics of a gateway, each in a registry of its own so that several gateways fit one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from gateway.access.caller import Caller
from gateway.decoding.metrics import METRICS, Metric, SpeculationMetrics
from gateway.requests.types import TokenUsage
from specdec.rules import Rule

LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class GatewayMetrics:
    """What is counted. ``queue`` is the time a session waited on the target to be admitted."""

    def __init__(self, model_name: Callable[[], str] = str) -> None:
        """``model_name``: the label of every metric; empty while it is not known, then there is no label."""
        self._model_name = model_name
        self.registry = CollectorRegistry()
        self._own: list[Counter | Histogram] = []
        #: Names of the labels of each counter, but ``model_name``.
        self.labels: dict[str, tuple[str, ...]] = {}
        self.requests = self._counter("requests", "Finished samples by outcome", ("outcome",))
        self.rejected = self._counter(
            "requests_rejected",
            "Requests answered with an error, by HTTP status and name of the error",
            ("status", "reason"),
        )
        self.running = Gauge("tandem_requests_running", "Samples being generated", registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens that an earlier request had computed")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.refusals = self._counter("client_refusals", "Requests above a limit of their client", ("key", "limit"))
        self._by_key = [
            self._counter("key_requests", "Finished samples by API key", ("key", "outcome")),
            self._counter("key_prompt_tokens", "Prompt tokens by API key", ("key",)),
            self._counter("key_generation_tokens", "Generated tokens by API key", ("key",)),
        ]
        self.ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self.itl = self._histogram("inter_token_latency_seconds", "Between the verdicts of a sample, per token")
        self.latency = self._histogram("request_latency_seconds", "From the request to its last token")
        self.prefill = self._histogram("prefill_seconds", "The target's work on a prompt")
        self.decode = self._histogram("decode_seconds", "From the first token to the last")
        self.queue = self._histogram("target_queue_seconds", "Waiting to be admitted by the target")
        self._speculation = {
            name: self._counter(metric.counter, metric.text, (metric.label,) if metric.label else ())
            for name, metric in METRICS.items()
            if metric.counter is not None
        }

    def finish(
        self,
        outcome: str,
        speculation: SpeculationMetrics,
        usage: TokenUsage | None,
        rule: Rule | None = None,
        *,
        key: str = "",
    ) -> None:
        """Count a sample that ended; ``outcome`` is its finish reason or the name of its error, ``rule`` the one it ran
        under, ``key`` the name of its caller's API key.
        """
        self.requests.labels(outcome).inc()
        if usage is not None:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_tokens)
            self.generation_tokens.inc(usage.completion_tokens)
        if key:
            requests, prompt_tokens, generation_tokens = self._by_key
            requests.labels(key, outcome).inc()
            if usage is not None:
                prompt_tokens.labels(key).inc(usage.prompt_tokens)
                generation_tokens.labels(key).inc(usage.completion_tokens)
        for name, counter in self._speculation.items():
            self._add(counter, METRICS[name], getattr(speculation, name), rule)

    def follow_key_file(self, is_in_use: Callable[[], bool]) -> None:
        """Tell whether the key file as it is now is in use."""
        text = "1: the key file as it is now is in use; 0: it cannot be read, and keys of before are"
        Gauge("tandem_key_file_up", text, registry=self.registry).set_function(is_in_use)

    def refuse(self, caller: Caller, limit: str) -> None:
        """Count a request that was refused for a limit of its client."""
        self.refusals.labels(caller.key, limit).inc()

    def _add(self, counter: Counter, metric: Metric, value: Any, rule: Rule | None) -> None:
        if isinstance(value, list):
            for index, each in enumerate(value):
                if each:
                    counter.labels(str(index)).inc(each)
        elif isinstance(value, str):
            if value:
                counter.labels(value).inc()
        elif metric.label is None:
            counter.inc(value * metric.scale)
        elif rule is not None:
            counter.labels(rule).inc(value * metric.scale)

    def families(self) -> Iterator[MetricFamily]:
        """The counters and histograms of this class, as they are now."""
        for each in self._own:
            yield from each.collect()

    def render_as(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the format that an ``Accept`` header asks for, OpenMetrics or Prometheus', and its name."""
        encode: Any  # the partial function that it is takes more than its type says
        encode, content_type = choose_encoder(accept)
        model_name = self._model_name()
        registry = _Labelled(self.registry, model_name) if model_name else self.registry
        # No name needs escaping. By default prometheus_client makes ``vllm_`` of ``vllm:`` in samples of OpenMetrics.
        return encode(registry, escaping=ALLOWUTF8), content_type

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        self._own.append(counter := Counter(f"tandem_{name}", text, labels, registry=self.registry))
        self.labels[f"tandem_{name}"] = labels
        return counter

    def _histogram(self, name: str, text: str) -> Histogram:
        histogram = Histogram(f"tandem_{name}", text, registry=self.registry, buckets=LATENCY_BUCKETS)
        self._own.append(histogram)
        return histogram


class _Labelled(Collector):
    """The metrics of a registry, each sample with the label ``model_name``."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def collect(self) -> Iterable[MetricFamily]:
        """The metrics of this moment."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model_name}) for sample in family.samples
            ]
            yield family
