"""Metrics of the gateway once more under vLLM's names, which dashboards and autoscalers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from gateway.telemetry.metrics import GatewayMetrics

#: vLLM's names by ours, without ``tandem_`` and the suffixes of samples.
_NAMES: Final[Mapping[str, str]] = {
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "cached_prompt_tokens": "vllm:prefix_cache_hits",
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "prefill_seconds": "vllm:request_prefill_time_seconds",
    "decode_seconds": "vllm:request_decode_time_seconds",
    "target_queue_seconds": "vllm:request_queue_time_seconds",
    "spec_decode_num_spec_steps": "vllm:spec_decode_num_drafts",
    "spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
#: vLLM's reasons by our outcomes; others are errors, which vLLM does not count.
_REASONS: Final[Mapping[str, str]] = {"stop": "stop", "length": "length", "cancelled": "abort"}
_OUTCOMES: Final = "tandem_requests"
_ROUNDS: Final = "tandem_spec_decode_rounds"


class VllmNames(Collector):
    """Reads the other metrics when Prometheus asks."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[MetricFamily]:
        """The metrics of this moment."""
        for family in self._metrics.families():
            name = family.name.removeprefix("tandem_")
            if (alias := _NAMES.get(name)) is not None:
                yield _renamed(family, alias)
            if name == "prompt_tokens":  # each is looked up
                yield _renamed(family, "vllm:prefix_cache_queries")
            elif family.name == _OUTCOMES:
                yield _finished(family)
            elif family.name == _ROUNDS:
                yield _accepted_by_position(family)


def _renamed(family: MetricFamily, alias: str) -> MetricFamily:
    result = MetricFamily(alias, family.documentation, family.type)
    for sample in family.samples:
        if sample.name.endswith("_created"):
            continue
        suffix = sample.name.removeprefix(family.name)
        result.add_sample(alias + suffix, sample.labels, sample.value)
    return result


def _finished(outcomes: MetricFamily) -> MetricFamily:
    """Samples that ended well, by vLLM's reasons."""
    result = CounterMetricFamily("vllm:request_success", "Finished samples by reason", labels=("finished_reason",))
    for sample in outcomes.samples:
        if sample.name.endswith("_total") and (reason := _REASONS.get(sample.labels["outcome"])) is not None:
            result.add_metric((reason,), sample.value)
    return result


def _accepted_by_position(rounds: MetricFamily) -> MetricFamily:
    """Accepted tokens by their position in the draft, from rounds by the number of accepted tokens."""
    result = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position", labels=("position",)
    )
    counts = {int(s.labels["accepted"]): s.value for s in rounds.samples if s.name.endswith("_total")}
    for position in range(max(counts, default=0)):
        accepted = sum(value for num_accepted, value in counts.items() if num_accepted > position)
        result.add_metric((str(position),), accepted)
    return result
