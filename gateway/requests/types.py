"""What goes into generation and what comes out of it, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.round import Origin
from gateway.requests.call_trace import CallTrace
from gateway.text.message import AssistantMessage, MessageDelta
from gateway.text.replies import ReplyPlan
from specdec.logprobs import PositionLogprobs
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue, ``params.n`` times."""

    #: Text, or token ids taken as they are.
    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    #: Name of a served model; empty means the only one.
    model: str = ""
    #: None means the gateway's setting, or ``SEEDED_RULE`` where ``params.seed`` is given.
    rule: Rule | None = None
    #: Drafted tokens a round at most; 0 decodes plainly; None means the method's own.
    num_speculative_tokens: int | None = None
    #: Method of drafting, of two "a+b"; empty means what the gateway is configured with.
    method: str = ""
    #: Token of the client's attachment that drafts, while it is there; empty: none.
    attachment: str = ""
    #: What the text is expected to be, as text or token ids: it is drafted. Empty means nothing is expected.
    prediction: str | Sequence[int] = ""
    #: Name of a conversation: its requests go to the same target and draft; empty means none.
    session_id: str = ""
    #: OpenAI's name for requests with a common prefix: the session id of a request that has none.
    prompt_cache_key: str = ""
    #: Requests of a client reuse the computed beginnings of prompts with the same salt alone.
    cache_salt: str = ""
    #: Seconds from now until the request fails; None means the gateway's setting.
    timeout_s: float | None = None
    #: Add the model's special tokens to a prompt given as text.
    add_special_tokens: bool = True
    #: How the answer of a chat is read; None: it is text.
    reply: ReplyPlan | None = None
    #: The field that asked for ``params.structured_outputs``, as errors name it where no tools did; empty: itself.
    outputs_field: str = ""
    #: Id for logs and answers; empty draws one.
    request_id: str = ""
    #: Report where each token came from.
    return_token_metrics: bool = False
    #: The spans of its call; None: it is not traced.
    trace: CallTrace | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities at a position of an answer, and where the token's text starts."""

    position: PositionLogprobs
    #: Characters of the answer before the token.
    text_offset: int


@dataclass(frozen=True, slots=True)
class TokenMetrics:
    """What speculation did for one token. REST, gRPC and the table in ``docs/api.md`` have the same fields."""

    #: The text that became certain with it.
    text: str
    origin: Origin
    #: The sample's round that committed it, from 1; 0: the target decoded it without a proposal.
    round: int = 0
    #: Nanoseconds the draft computed for that round, and that there was a verdict but no proposal for it.
    draft_ns: int = 0
    draft_wait_ns: int = 0
    #: Nanoseconds from the request's arrival until the gateway had the token.
    time_ns: int = 0

    def report(self) -> dict[str, Any]:
        """The values by their names in REST and in the proto."""
        return {name: getattr(self, name) for name in TOKEN_METRICS}


#: What is reported of a token, by name.
TOKEN_METRICS: Final = tuple(each.name for each in fields(TokenMetrics))


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    #: Prompt tokens that an earlier request had computed.
    cached_tokens: int = 0
    #: Generated tokens of thoughts, the markers around them included.
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The prompt as the model got it; comes with the first chunk of sample 0."""

    token_ids: tuple[int, ...]
    #: From the second token on, when ``prompt_logprobs`` was asked for.
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalChunk:
    """What only the last chunk of a sample knows."""

    reason: FinishReason
    #: The stop string or the request's own stop token that ended the text; None for end-of-sequence and limits.
    stop_reason: str | int | None
    usage: TokenUsage
    speculation: SpeculationMetrics
    #: The answer is a message with calls of tools.
    has_calls: bool = False

    @property
    def finish_reason(self) -> str:
        """OpenAI's name of how the answer ended."""
        return "tool_calls" if self.has_calls and self.reason is FinishReason.STOP else str(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """A piece of one sample."""

    request_id: str
    #: Number of the sample, from 0.
    index: int = 0
    #: New text; empty while a character or a stop string is undecided.
    text: str = ""
    #: What the text means where the answer is read as a message.
    message: MessageDelta | None = None
    token_ids: tuple[int, ...] = ()
    num_reasoning_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: One entry per token, if asked for.
    token_metrics: tuple[TokenMetrics, ...] = ()
    prompt: PromptReport | None = None
    #: Set in the sample's last chunk.
    final: FinalChunk | None = None

    @property
    def content(self) -> str:
        """New text without thoughts and calls, where it is read as a message."""
        return self.text if self.message is None else self.message.content

    def without_output(self) -> GenerationChunk:
        """The chunk of a request that wanted its prompt only."""
        final = self.final
        if final is not None:
            final = replace(final, usage=replace(final.usage, completion_tokens=0), stop_reason=None)
        return replace(self, text="", message=None, token_ids=(), logprobs=(), token_metrics=(), final=final)


@dataclass(slots=True)
class Sample:
    """One finished continuation."""

    index: int
    text: str = ""
    #: What the text means; None: it was not read.
    message: AssistantMessage | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_metrics: list[TokenMetrics] = field(default_factory=list)
    final: FinalChunk | None = None

    def add(self, chunk: GenerationChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        if chunk.message is not None:
            self.message = self.message or AssistantMessage()
            self.message.add(chunk.message)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.token_metrics += chunk.token_metrics
        self.final = chunk.final or self.final


@dataclass(slots=True)
class GenerationResult:
    """All samples of one request."""

    request_id: str
    prompt: PromptReport
    samples: list[Sample]
    #: Unix time of the first chunk; None if there was none.
    first_chunk_s: float | None = None

    @property
    def usage(self) -> TokenUsage:
        """Counts over all samples; the prompt counts once."""
        finals = [sample.final.usage for sample in self.samples if sample.final is not None]
        return TokenUsage(
            len(self.prompt.token_ids),
            sum(usage.completion_tokens for usage in finals),
            max((usage.cached_tokens for usage in finals), default=0),
        )

    @property
    def speculation(self) -> SpeculationMetrics:
        """Counts over all samples."""
        return SpeculationMetrics.total([sample.final.speculation for sample in self.samples if sample.final])
