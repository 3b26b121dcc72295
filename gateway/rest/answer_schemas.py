"""What the REST API answers, for its OpenAPI description. Answers themselves are made as plain dictionaries."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from gateway.decoding.metrics import METRICS, SpeculationMetrics
from gateway.decoding.round import Origin
from gateway.requests import types

Logprob: TypeAlias = Annotated[float, Field(le=0)]
FinishReason: TypeAlias = Literal["stop", "length"]
ChatFinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
_ORIGIN: Any = Literal[tuple(map(str, Origin))]


class Answer(BaseModel):
    """Has no other fields."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Answer):
    """What is wrong, in OpenAI's shape."""

    message: str
    type: str
    #: The field it is about.
    param: str | None
    #: The HTTP status, or OpenAI's name of the error.
    code: int | str


class ErrorAnswer(Answer):
    """The body of every error."""

    error: ErrorDetails


class PromptTokensDetails(Answer):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Tokens of thoughts, the markers around them included, and what became of the prediction's that were drafted."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


SpeculativeDecoding = create_model(
    "SpeculativeDecoding",
    __base__=Answer,
    **{name: (type(getattr(SpeculationMetrics(), name)), ...) for name in METRICS},  # type: ignore[call-overload]
)


class Metrics(Answer):
    """What speculation did."""

    speculative_decoding: SpeculativeDecoding  # type: ignore[valid-type]


class PromptToken(Answer):
    """One candidate at a position of the prompt."""

    logprob: Logprob
    rank: int
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Answer):
    """OpenAI's log-probabilities of completions; one entry a token."""

    text_offset: list[int]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


TokenMetrics = create_model(
    "TokenMetrics",
    __base__=Answer,
    **{name: (_ORIGIN if kind is Origin else kind, ...) for name, kind in get_type_hints(types.TokenMetrics).items()},  # type: ignore[call-overload]
)


class Choice(Answer):
    """What all choices have."""

    index: int
    #: The stop string or token; null for end-of-sequence and limits.
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    token_metrics: list[TokenMetrics] | None = None  # type: ignore[valid-type]


class CompletionChoice(Choice):
    """One sample, or a piece of it."""

    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatToken(Answer):
    """One candidate at a position of the answer."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatPosition(ChatToken):
    """One position of the answer."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    """OpenAI's log-probabilities of chats."""

    content: list[ChatPosition]
    refusal: None


class CallFunction(Answer):
    """What is called; in later pieces of a call only arguments."""

    name: str | None = None
    #: JSON text.
    arguments: str


class ChatCall(Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CallFunction


class ChatCallDelta(Answer):
    """A piece of a call; the first one has id and name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallFunction


class ChatMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    #: Null where there are only calls.
    content: str | None
    reasoning_content: str | None = None
    #: The same.
    reasoning: str | None = None
    tool_calls: list[ChatCall] | None = None


class ChatDelta(Answer):
    """A piece of the model's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ChatCallDelta] | None = None


class ChatChoice(Choice):
    """One sample."""

    message: ChatMessage
    finish_reason: ChatFinishReason | None
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    """A piece of one sample."""

    delta: ChatDelta
    finish_reason: ChatFinishReason | None
    logprobs: ChatLogprobs | None


class AnswerHead(Answer):
    """What every object of an answer begins with."""

    id: str
    created: int
    model: str


class CompletionAnswer(AnswerHead):
    """The answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics


class CompletionEvent(AnswerHead):
    """One event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None


class ChatAnswer(AnswerHead):
    """The answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatEvent(AnswerHead):
    """One event of its stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(Answer):
    """A served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(Answer):
    """The answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(Answer):
    """The answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """The answer of ``/detokenize``."""

    prompt: str


class HealthAnswer(Answer):
    """The answer of ``/health``."""

    status: Literal["ok"]


class VersionAnswer(Answer):
    """The answer of ``/version``."""

    version: str


class TokenizerAnswer(Answer):
    """The answer of ``/tokenizer_info``; null where the model has no such token."""

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    sep_token: str | None
    cls_token: str | None
    mask_token: str | None
    chat_template: str | None


class ServiceAnswer(Answer):
    """A target or a draft."""

    name: str
    status: Literal["up", "down"]
    #: Why it cannot be used; empty where it can.
    reason: str
    model: str
    num_sessions: int
    num_waiting_sessions: int


class TargetAnswer(ServiceAnswer):
    """A target."""

    kv_use: float


class DraftAnswer(ServiceAnswer):
    """A draft."""

    method: str
    busy_share: float


class MethodAnswer(Answer):
    """What ``speculation.method`` may name, and drafted tokens a round at most."""

    name: str
    num_speculative_tokens: int


class ServicesAnswer(Answer):
    """The answer of ``/services``."""

    model: str
    #: Drafted tokens of a round; 0 with engines as targets.
    num_speculative_tokens: int
    num_running: int
    num_waiting: int
    targets: list[TargetAnswer]
    drafts: list[DraftAnswer]
    lookups: list[str]
    methods: list[MethodAnswer]


class RootAnswer(VersionAnswer):
    """The answer of ``/``."""

    name: str
    api: str
    docs: str
