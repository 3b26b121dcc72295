"""What :class:`tandem.LLM` returns, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.decoding.metrics import SpeculationMetrics
from gateway.requests.types import FinalChunk, GenerationResult, Sample
from gateway.text.message import ReadCall
from gateway.text.tokenizer import TextTokenizer
from specdec.logprobs import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability (nats) of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and its arguments, JSON as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: str = "function"


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    #: All of it. Of a chat that includes thoughts, calls and the markers around them.
    text: str
    token_ids: list[int]
    #: Sum of the chosen tokens' log-probabilities; None unless they were asked for.
    cumulative_logprob: float | None
    #: Per token, the chosen and the most likely ones by id; None unless asked for.
    logprobs: list[dict[int, Logprob]] | None
    #: "stop", "length" or "tool_calls".
    finish_reason: str | None = None
    #: The stop string or stop token that ended the text; None for end-of-sequence and limits.
    stop_reason: int | str | None = None
    #: Of a chat: what ``text`` says without thoughts and calls, the thoughts, and the calls. None elsewhere, and
    #: without ``detokenize``.
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    def finished(self) -> bool:
        """Whether the continuation has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments of a request (``time.time()``) and what speculation did for it, over all its continuations."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    #: Rounds that verified at least one drafted token.
    num_drafts: int = 0
    #: Drafted tokens verified, and how many of them were accepted.
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    #: Entry i: rounds in which the drafted token i was accepted.
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    #: Accepted / drafted.
    draft_acceptance_rate: float = 0.0
    #: Mean tokens per round, the target's own included.
    mean_acceptance_length: float = 0.0

    @classmethod
    def of(
        cls, speculation: SpeculationMetrics, arrived: float, first: float | None, finished: float
    ) -> RequestMetrics:
        """From the gateway's counts."""
        histogram = speculation.acceptance_histogram
        return cls(
            arrival_time=arrived,
            first_token_time=first,
            finished_time=finished,
            num_drafts=speculation.num_spec_steps,
            num_draft_tokens=speculation.num_draft_tokens,
            num_accepted_tokens=speculation.num_accepted_draft_tokens,
            num_accepted_tokens_per_pos=[sum(histogram[place:]) for place in range(1, len(histogram))],
            draft_acceptance_rate=speculation.draft_acceptance_rate,
            mean_acceptance_length=speculation.mean_acceptance_length,
        )


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its continuations."""

    request_id: str
    #: The prompt's text; None when it was given as token ids.
    prompt: str | None
    prompt_token_ids: list[int]
    #: Per prompt token (None for the first), the token and the most likely ones by id; None unless asked for.
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


def make_output(
    result: GenerationResult,
    prompt: str | None,
    tokenizer: TextTokenizer | None,
    *,
    times: tuple[float, float | None, float],
    with_logprobs: bool,
) -> RequestOutput:
    """vLLM's shape of a finished request; ``times`` are arrival, first token and end."""
    return RequestOutput(
        request_id=result.request_id,
        prompt=prompt,
        prompt_token_ids=list(result.prompt.token_ids),
        prompt_logprobs=_prompt_logprobs(result.prompt.logprobs, tokenizer),
        outputs=[_completion(sample, tokenizer, with_logprobs=with_logprobs) for sample in result.samples],
        finished=all(sample.final is not None for sample in result.samples),
        metrics=RequestMetrics.of(result.speculation, *times),
        num_cached_tokens=result.usage.cached_tokens,
    )


def _completion(sample: Sample, tokenizer: TextTokenizer | None, *, with_logprobs: bool) -> CompletionOutput:
    final: FinalChunk | None = sample.final
    message = sample.message
    return CompletionOutput(
        index=sample.index,
        text=sample.text,
        token_ids=list(sample.token_ids),
        cumulative_logprob=sum(entry.position.logprob for entry in sample.logprobs) if with_logprobs else None,
        logprobs=[_logprobs(entry.position, tokenizer) for entry in sample.logprobs] if with_logprobs else None,
        finish_reason=final.finish_reason if final else None,
        stop_reason=final.stop_reason if final else None,
        content=message.content if message else None,
        reasoning=message.reasoning if message else None,
        tool_calls=[_tool_call(call) for call in message.calls] if message else None,
    )


def _tool_call(call: ReadCall) -> ToolCall:
    return ToolCall(call.id, FunctionCall(call.name, call.arguments))


def _logprobs(position: PositionLogprobs, tokenizer: TextTokenizer | None) -> dict[int, Logprob]:
    """The token that stands there, then the others."""
    *top, own = position.all
    return {
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id) if tokenizer else None)
        for token_id, logprob, rank in (own, *top)
    }


def _prompt_logprobs(
    entries: Sequence[PositionLogprobs], tokenizer: TextTokenizer | None
) -> list[dict[int, Logprob] | None] | None:
    if not entries:
        return None
    return [None, *(_logprobs(entry, tokenizer) for entry in entries)]
