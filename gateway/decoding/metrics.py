"""What speculation did for one request, under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self

from specdec.types import Verdict


@dataclass(frozen=True, slots=True)
class Metric:
    """How one metric is reported. REST, gRPC and Prometheus follow from it."""

    text: str
    #: Name of its Prometheus counter without ``tandem_`` and ``_total``; None: it has none.
    counter: str | None = None
    #: The counter's label: "rule" under which the sample ran, the index in a list, or the value of a text.
    label: str | None = None
    #: The counter's value for a value of 1.
    scale: float = 1.0


class _Derived(property):
    """A property that is reported like a field."""

    metric: Metric


def _count(text: str, counter: str | None = None, *, label: str | None = None, scale: float = 1.0) -> Any:
    return field(default=0, metadata={"metric": Metric(text, counter, label, scale)})


def _derived(
    counter: str | None = None, *, label: str | None = None
) -> Callable[[Callable[[Any], float | str]], _Derived]:
    def make(getter: Callable[[Any], float | str]) -> _Derived:
        result = _Derived(getter)
        result.metric = Metric((getter.__doc__ or "").rstrip("."), counter, label)
        return result

    return make


@dataclass(slots=True)
class SpeculationMetrics:
    """Counts of one request; the rates are derived from them.

    This is the one statement of what is reported. A new metric is a field here, a field of the same name in the proto,
    and the place where it is counted.
    """

    num_spec_steps: int = _count("Rounds that verified at least one drafted token", "spec_decode_num_spec_steps")
    num_draft_tokens: int = _count("Drafted tokens verified", "spec_decode_num_draft_tokens")
    num_accepted_draft_tokens: int = _count("Drafted tokens accepted", "spec_decode_num_accepted_tokens")
    # In a tree: all tokens that might have followed were rejected.
    num_rejections: int = _count("Rounds in which a drafted token was rejected")
    acceptance_histogram: list[int] = field(
        default_factory=list,
        metadata={
            "metric": Metric("Rounds by the number of drafted tokens accepted", "spec_decode_rounds", "accepted")
        },
    )
    num_draft_failures: int = _count("Times a draft was lost, slow or refused", "draft_failures")
    num_target_failures: int = _count("Times a session was lost on a target", "target_failures")
    num_stale: int = _count("Messages that did not fit the session's state", "stale_messages")
    num_direct_rounds: int = _count(
        "Rounds whose proposal the target itself asked the draft for", "spec_decode_num_direct_rounds"
    )
    num_hidden_states: int = _count("Positions whose hidden states were sent", "spec_decode_num_hidden_states")
    hidden_state_bytes: int = _count("Their bytes", "spec_decode_hidden_state_bytes")
    draft_ns: int = _count("Nanoseconds the draft computed for the proposals that were verified")
    draft_wait_ns: int = _count(
        "Time with a verdict but no proposal for the next round", "spec_decode_draft_wait_seconds", scale=1e-9
    )
    wire_ns: int = _count(
        "Time of rounds beyond the target's queue and work: network and hand-overs",
        "spec_decode_wire_seconds",
        scale=1e-9,
    )
    #: Why nothing was speculated, had nothing been speculated; not reported.
    plain_reason: str = ""
    #: Drafted tokens the draft sent, verified or not; not reported.
    num_received_draft_tokens: int = 0

    #: Tokens of the client's prediction that were accepted, and those that were rejected; reported as usage.
    num_accepted_predicted_tokens: int = 0
    num_rejected_predicted_tokens: int = 0

    @_derived("spec_decode_num_wasted_tokens")
    def num_wasted_draft_tokens(self) -> int:
        """Drafted tokens that were never verified."""
        return max(0, self.num_received_draft_tokens - self.num_draft_tokens)

    @_derived()
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @_derived()
    def mean_acceptance_length(self) -> float:
        """Mean tokens committed per round with drafts, the target's own included; 0 without such rounds."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @_derived("spec_decode_plain_samples", label="reason")
    def no_speculation_reason(self) -> str:
        """Why no round had a drafted token; empty where one had."""
        return "" if self.num_spec_steps else self.plain_reason

    def report(self) -> dict[str, Any]:
        """The values of all :data:`METRICS`, by their names in REST and in the proto."""
        return {name: getattr(self, name) for name in METRICS}

    def record(self, verdict: Verdict, round_ns: int, depth: int | None = None) -> None:
        """Count a round; one without drafts counts for nothing. ``round_ns``: from asking for it to its verdict, or
        from the verdict before where it was asked for already then. ``depth``: drafted tokens that might have been
        accepted; None: all of them, for they were a chain.
        """
        if not verdict.num_draft_tokens:
            return
        timings = verdict.timings
        self.wire_ns += max(0, round_ns - timings.queue_ns - timings.forward_ns - timings.verify_ns)
        self.num_spec_steps += 1
        self.num_draft_tokens += verdict.num_draft_tokens
        self.num_accepted_draft_tokens += verdict.num_accepted
        self.num_rejections += verdict.num_accepted < (verdict.num_draft_tokens if depth is None else depth)
        missing = verdict.num_accepted + 1 - len(self.acceptance_histogram)
        if missing > 0:
            self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[verdict.num_accepted] += 1

    def add(self, other: SpeculationMetrics) -> None:
        """Add the counts of another sample of the same request."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.plain_reason = self.plain_reason or other.plain_reason
        mine, theirs = self.acceptance_histogram, other.acceptance_histogram
        mine.extend([0] * (len(theirs) - len(mine)))
        for accepted, rounds in enumerate(theirs):
            mine[accepted] += rounds

    @classmethod
    def total(cls, parts: list[SpeculationMetrics]) -> Self:
        """The sum over several samples."""
        result = cls()
        for part in parts:
            result.add(part)
        return result


_SUMS: Final = tuple(field.name for field in fields(SpeculationMetrics) if field.type == "int")
#: What is reported of a request, by name.
METRICS: Final[dict[str, Metric]] = {
    **{each.name: each.metadata["metric"] for each in fields(SpeculationMetrics) if "metric" in each.metadata},
    **{name: each.metric for name, each in vars(SpeculationMetrics).items() if isinstance(each, _Derived)},
}
