"""Speculation metrics are stated once: REST, gRPC and Prometheus have the same."""

from gateway.decoding.metrics import METRICS, SpeculationMetrics
from gateway.requests.types import TokenUsage
from gateway.telemetry.metrics import GatewayMetrics
from specdec.rules import Rule
from specdec.types import Verdict
from specdec.v1 import generation_service_pb2 as pb


def filled():
    """Metrics of which no value is 0."""
    metrics = SpeculationMetrics(num_received_draft_tokens=1000)
    for name in METRICS:
        if isinstance(getattr(metrics, name), int) and name != "num_wasted_draft_tokens":
            setattr(metrics, name, len(name))
    metrics.record(Verdict(1, 5, (1, 2, 3), num_accepted=2, num_draft_tokens=4), 1)
    return metrics


def test_the_proto_has_the_same_fields():
    fields = pb.SpeculationMetrics.DESCRIPTOR.fields
    assert set(METRICS) == {field.name for field in fields if not field.GetOptions().deprecated}
    report = filled().report()
    message = pb.SpeculationMetrics(**report)
    assert {name: getattr(message, name) for name in METRICS} == report
    assert [name for name, value in report.items() if not value] == ["no_speculation_reason"]


def test_prometheus_counts_every_metric_that_names_a_counter():
    metrics, speculation = GatewayMetrics(), filled()
    metrics.finish("stop", speculation, TokenUsage(1, 2), Rule.BLOCK)
    lines = metrics.render_as("")[0].decode().splitlines()
    for name, metric in METRICS.items():
        if metric.counter is None:
            continue
        value = getattr(speculation, name)
        expected = sum(value) if isinstance(value, list) else (value or 0) * metric.scale
        found = [line for line in lines if line.startswith(f"tandem_{metric.counter}_total")]
        assert sum(float(line.rpartition(" ")[2]) for line in found) == expected
        assert f"# HELP tandem_{metric.counter}_total {metric.text}" in lines


def test_prometheus_counts_plain_samples_by_reason():
    metrics = GatewayMetrics()
    for reason in ("pacing", "pacing", "no_draft"):
        metrics.finish("stop", SpeculationMetrics(plain_reason=reason), TokenUsage(1, 2))
    lines = metrics.render_as("")[0].decode().splitlines()
    assert 'tandem_spec_decode_plain_samples_total{reason="pacing"} 2.0' in lines
    assert 'tandem_spec_decode_plain_samples_total{reason="no_draft"} 1.0' in lines
