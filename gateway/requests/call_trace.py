"""The spans of one call in the gateway, by OpenTelemetry's conventions for generative AI (``gen_ai.…``).

The call has a span; below it are one for its time in the queue and one for each sample. A sample has a span for each
phase, and for some of its rounds. Texts are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gateway.access.request_id import current_request_id
from gateway.access.trace_context import current_trace_context
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.round import AskedRound
from specdec.params import SamplingParams
from specdec.tracing.headers import TraceHeaders
from specdec.types import TargetOpened, Verdict

if TYPE_CHECKING:  # it loads OpenTelemetry
    from specdec.tracing.spans import Span, Tracing

#: Of so many rounds of a sample one has a span, the first one included.
ROUND_INTERVAL: Final = 16


class SampleTrace:
    """The spans of one sample."""

    def __init__(self, call: CallTrace, span: Span, index: int) -> None:
        self._call = call
        self._index = index
        self._span = span
        self._num_rounds = 0
        self._is_open = False
        span.phase("prefill", start_ns=span.start_ns)
        #: What makes spans of targets and drafts children of the sample's.
        self.headers: TraceHeaders = span.headers

    def record(self, verdict: Verdict, answered: AskedRound | None, opened: TargetOpened | None, now_ns: int) -> None:
        """A verdict came, that of ``answered`` where that is a round with drafts."""
        if not self._is_open:
            self._is_open = True
            self._call.note_first_token(now_ns)
            self._span.phase("decode", start_ns=now_ns)
            if opened is not None:
                self._span.set(
                    {
                        "tandem.target_queue_s": opened.queue_ns / 1e9,
                        "tandem.prefill_s": opened.prefill_ns / 1e9,
                        "tandem.cached_tokens": opened.num_cached_tokens,
                    }
                )
        if answered is None:
            return
        if self._num_rounds % ROUND_INTERVAL == 0:
            self._record_round(verdict, answered, now_ns)
        self._num_rounds += 1

    def _record_round(self, verdict: Verdict, answered: AskedRound, now_ns: int) -> None:
        span, timings = self._span.child("round", start_ns=answered.asked_ns - answered.wait_ns), verdict.timings
        span.set(
            {
                "tandem.round.number": self._num_rounds + 1,
                "tandem.round.k": verdict.num_draft_tokens,
                "tandem.round.accepted": verdict.num_accepted,
                "tandem.round.acceptance_rate": verdict.num_accepted / max(verdict.num_draft_tokens, 1),
                "tandem.round.draft_wait_s": answered.wait_ns / 1e9,
                "tandem.round.draft_s": answered.draft_ns / 1e9,
                "tandem.round.target_queue_s": timings.queue_ns / 1e9,
                "tandem.round.forward_s": timings.forward_ns / 1e9,
                "tandem.round.verify_s": timings.verify_ns / 1e9,
                "tandem.round.is_looked_up": answered.is_looked_up,
            }
        )
        span.end(now_ns)

    def fail(self, error: Exception) -> None:
        """The sample ends with an error."""
        self._span.fail(error)

    def end(
        self, finish_reason: str | None, num_prompt_tokens: int, num_tokens: int, metrics: SpeculationMetrics
    ) -> None:
        """The sample ended; without a ``finish_reason`` it failed or was cancelled."""
        reasons = [] if finish_reason is None else [finish_reason]
        self._call.add(reasons, 0 if self._index else num_prompt_tokens, num_tokens)  # samples share a prompt
        self._span.set(
            {
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.output_tokens": num_tokens,
                "tandem.rounds": metrics.num_spec_steps,
                "tandem.draft_tokens": metrics.num_draft_tokens,
                "tandem.accepted_draft_tokens": metrics.num_accepted_draft_tokens,
                "tandem.acceptance_rate": metrics.draft_acceptance_rate,
                "tandem.draft_wait_s": metrics.draft_wait_ns / 1e9,
                "tandem.draft_failures": metrics.num_draft_failures,
                "tandem.target_failures": metrics.num_target_failures,
                "tandem.no_speculation_reason": metrics.no_speculation_reason or None,
            }
        )
        self._span.end()


class CallTrace:
    """The span of one call, and what its samples add up to."""

    def __init__(self, span: Span) -> None:
        self._span = span
        span.phase("queue", start_ns=span.start_ns)
        self._finish_reasons: list[str] = []
        self._num_prompt_tokens = 0
        self._num_tokens = 0
        self._first_token_ns: int | None = None

    def admitted(self) -> None:
        """The call has its slots."""
        self._span.end_phase()

    def sample(self, index: int) -> SampleTrace:
        """The spans of a sample that starts now."""
        span = self._span.child("sample", is_call=True)
        span.set({"tandem.sample": index})
        return SampleTrace(self, span, index)

    def note_first_token(self, now_ns: int) -> None:
        """A sample has its first token."""
        self._first_token_ns = self._first_token_ns or now_ns

    def add(self, finish_reasons: Sequence[str], num_prompt_tokens: int, num_tokens: int) -> None:
        """Count a sample that ended."""
        self._finish_reasons += finish_reasons
        self._num_tokens += num_tokens
        self._num_prompt_tokens += num_prompt_tokens

    def end(self) -> None:
        """The call ended."""
        first_ns = self._first_token_ns
        self._span.set(
            {
                "gen_ai.response.finish_reasons": self._finish_reasons,
                "gen_ai.usage.input_tokens": self._num_prompt_tokens,
                "gen_ai.usage.output_tokens": self._num_tokens,
                "gen_ai.latency.time_to_first_token": None
                if first_ns is None
                else (first_ns - self._span.start_ns) / 1e9,
            }
        )
        self._span.end()


@contextmanager
def trace_call(
    tracing: Tracing, request_id: str, model: str, all_params: Sequence[SamplingParams]
) -> Iterator[CallTrace | None]:
    """Serve a call within a span, below the client's; None where its trace is not sampled.

    ``all_params``: of each prompt; those of a call are the same.
    """
    operation, headers = current_trace_context()
    span = tracing.begin(f"{operation} {model}", headers)
    if span is None:
        yield None
        return
    params = all_params[0]
    span.set(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request_id,
            "gen_ai.request.choice.count": sum(each.n for each in all_params),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.seed": params.seed,
        }
    )
    call = CallTrace(span)
    try:
        yield call
    except Exception as error:
        span.fail(error)
        raise
    finally:
        call.end()


@contextmanager
def trace_refusal(tracing: Tracing, model: str) -> Iterator[None]:
    """Where the block fails, record a span of the call that it ends: one that is refused before it waits."""
    try:
        yield
    except Exception as error:
        operation, headers = current_trace_context()
        if (span := tracing.begin(f"{operation} {model}", headers)) is not None:
            span.set({"gen_ai.operation.name": operation, "gen_ai.response.id": current_request_id()})
            span.fail(error)
            span.end()
        raise
