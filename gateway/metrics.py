"""Prometheus metrics of a gateway, each in a registry of its own so that several gateways fit one process."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.decoding.metrics import SpeculationMetrics
from gateway.types import Usage
from specdec.rules import Rule

LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class GatewayMetrics:
    """What is counted. ``queue`` is the time a session waited on the target to be admitted."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Finished samples by outcome", ("outcome",))
        self.running = Gauge("tandem_requests_running", "Samples being generated", registry=self.registry)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens found in a parked cache")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token")
        self.itl = self._histogram("inter_token_latency_seconds", "Between the verdicts of a sample, per token")
        self.latency = self._histogram("request_latency_seconds", "From the request to its last token")
        self.queue = self._histogram("target_queue_seconds", "Waiting to be admitted by the target")
        self.spec_steps = self._counter("spec_decode_num_spec_steps", "Rounds that verified drafted tokens")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted")
        self.accepted_per_round = self._counter(
            "spec_decode_rounds", "Rounds by the number of drafted tokens accepted", ("accepted",)
        )
        self.ahead_hits = self._counter(
            "spec_decode_num_ahead_hits", "Verdicts that found the next proposal drafted ahead", ("rule",)
        )
        self.ahead_misses = self._counter(
            "spec_decode_num_ahead_misses", "Verdicts that found none, where drafting ahead is on", ("rule",)
        )
        self.wasted_tokens = self._counter("spec_decode_num_wasted_tokens", "Drafted tokens never verified")
        self.draft_wait = self._counter(
            "spec_decode_draft_wait_seconds", "Time with a verdict but no proposal for the next round yet"
        )
        self.wire = self._counter(
            "spec_decode_wire_seconds", "Time of rounds beyond the target's queue and work: network and hand-overs"
        )
        self.draft_failures = self._counter("draft_failures", "Times a draft was lost, slow or refused")
        self.target_failures = self._counter("target_failures", "Times a session was lost on a target")
        self.stale = self._counter("stale_messages", "Failures whose cause was a stale message")

    def finish(
        self, outcome: str, speculation: SpeculationMetrics, usage: Usage | None, rule: Rule | None = None
    ) -> None:
        """Count a sample that ended; ``outcome`` is its finish reason or the name of its error, ``rule`` the one it ran
        under.
        """
        self.requests.labels(outcome).inc()
        if usage is not None:
            self.prompt_tokens.inc(usage.prompt_tokens)
            self.cached_tokens.inc(usage.cached_tokens)
            self.generation_tokens.inc(usage.completion_tokens)
        self.spec_steps.inc(speculation.num_spec_steps)
        self.draft_tokens.inc(speculation.num_draft_tokens)
        self.accepted_tokens.inc(speculation.num_accepted_draft_tokens)
        for accepted, rounds in enumerate(speculation.acceptance_histogram):
            if rounds:
                self.accepted_per_round.labels(str(accepted)).inc(rounds)
        if rule is not None:
            self.ahead_hits.labels(rule).inc(speculation.num_ahead_hits)
            self.ahead_misses.labels(rule).inc(speculation.num_ahead_misses)
        self.wasted_tokens.inc(speculation.num_wasted_draft_tokens)
        self.draft_wait.inc(speculation.draft_wait_ns / 1e9)
        self.wire.inc(speculation.wire_ns / 1e9)
        self.draft_failures.inc(speculation.num_draft_failures)
        self.target_failures.inc(speculation.num_target_failures)
        self.stale.inc(speculation.num_stale)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tandem_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"tandem_{name}", text, registry=self.registry, buckets=LATENCY_BUCKETS)
