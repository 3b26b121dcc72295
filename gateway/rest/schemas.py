"""The bodies of the REST API: OpenAI's fields, and vLLM's beside them. A field that is not here is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, PrivateAttr, create_model

from gateway.requests.types import GenerationRequest
from gateway.rest.body import FAIL_FAST, FILLED, MEANINGFUL, Body, IgnoredField, Refused, RefusedField
from gateway.rest.message_schemas import Message
from gateway.rest.structured_outputs import structured_outputs_of
from gateway.text.replies import ReplyPlan
from specdec.errors import InvalidRequest, quote
from specdec.params import MAX_LOGPROBS, Parameter, SamplingParams, parameters
from specdec.rules import Rule
from specdec.structured_outputs import StructuredOutputsParams, asked_by

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], FAIL_FAST]
Texts = Annotated[list[str], FAIL_FAST]
#: Digits of the largest token id of a message, 2^32 - 1.
MAX_TOKEN_ID_DIGITS: Final = 10
#: The fields that say what the text must look like.
_OUTPUTS: Final = (
    *("response_format", "structured_outputs"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
)
if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(str(rule) for rule in Rule)]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a body, and what else is kept of the fields they were made from."""

    #: As text or as token ids, for the model.
    given: Sequence[str | Sequence[int]]
    #: As text where the client gave text, to be given back.
    texts: Sequence[str | None]
    #: The names of the given fields that have no effect.
    ignored: frozenset[str]
    #: What the text is expected to be.
    prediction: str | Sequence[int] = ""


class StreamOptions(Body):
    """OpenAI's ``stream_options``, and vLLM's."""

    path: ClassVar[str] = "stream_options"

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: IgnoredField = None


class Speculation(Body):
    """Switches of speculation for one request."""

    path: ClassVar[str] = "speculation"

    num_speculative_tokens: int | None = None
    verification: RuleName | None = None
    method: str | Texts | None = None

    @property
    def method_name(self) -> str:
        """The method; two of them as the names of both with "+" between."""
        return "+".join(self.method) if isinstance(self.method, list) else self.method or ""


#: The sampling parameters of both endpoints, and the JSON types of those whose Python type JSON does not have.
_ROWS: Final = tuple(row for row in parameters() if row.in_rest)
_JSON_TYPES: Final[Mapping[Any, Any]] = {
    Sequence[int]: TokenIds,
    Sequence[str]: Texts,
    str | Sequence[str]: str | Texts,
    Mapping[int, float]: Annotated[dict[str, float], FAIL_FAST],
}


def _json_type(row: Parameter) -> Any:
    """The type of a parameter's field."""
    kind = _JSON_TYPES.get(row.type, row.type) | None
    return Annotated[kind, MEANINGFUL, FILLED] if row.refuses_empty else kind


if TYPE_CHECKING:

    class SamplingFields(Body):
        """The fields that code reads by name; all of them come from the table."""

        max_tokens: int | None
        n: int | None
        prompt_logprobs: int | None
        logit_bias: dict[str, float] | None
else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        **{row.name: (_json_type(row), None) for row in _ROWS},
    )


class PredictionPart(Body):
    """A part of a prediction."""

    path: ClassVar[str] = "prediction.content"

    type: Literal["text"]
    text: Annotated[str, MEANINGFUL]


class Prediction(Body):
    """OpenAI's ``prediction``: what the text is expected to be."""

    path: ClassVar[str] = "prediction"

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], FAIL_FAST]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class SamplingBody(SamplingFields):
    """The fields of both endpoints: the sampling parameters and more. ``None`` always means the default."""

    #: The fields that prompts are made from.
    _read_fields: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = None
    # vLLM's.
    add_special_tokens: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Tandem's.
    return_token_metrics: bool | None = None
    session_id: str | None = None
    # OpenAI's; the session id where none is given.
    prompt_cache_key: str | None = None
    # vLLM's: separates what requests may reuse of each other.
    cache_salt: str | None = None
    speculation: Speculation | None = None
    # OpenAI's.
    prediction: Prediction | None = None
    # What the text must look like: OpenAI's field, vLLM's, and vLLM's older ones.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    # For whom, at what price and when.
    metadata: IgnoredField = None
    priority: IgnoredField = None
    prompt_cache_retention: IgnoredField = None
    safety_identifier: IgnoredField = None
    service_tier: IgnoredField = None
    store: IgnoredField = None
    user: IgnoredField = None
    # Of beam search and of slow tokenizers, which are not here.
    length_penalty: IgnoredField = None
    spaces_between_special_tokens: IgnoredField = None
    # What would change the answer.
    logits_processors: RefusedField = None
    truncate_prompt_tokens: RefusedField = None
    use_beam_search: RefusedField = None

    _prompts: Prompts = PrivateAttr()

    @property
    def read(self) -> Prompts:
        """What reading the body made of it."""
        return self._prompts

    def keep(self, prompts: Prompts) -> None:
        """Set :attr:`read`."""
        self._prompts = prompts

    def drop_what_was_read(self) -> None:
        """Forget the values that only :attr:`read` was made from, and those that have no effect."""
        for name in {*self._read_fields, "prediction", *super().ignored()}:
            setattr(self, name, None)

    def ignored(self) -> Iterator[str]:
        """The names of the given fields that have no effect, those of inner objects included."""
        yield from super().ignored()
        if self.stream_options is not None:
            yield from self.stream_options.ignored()

    def check_stream(self) -> None:
        """Refuse options of a stream where there is none."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")

    def limit_tokens(self) -> int | None:
        """``max_completion_tokens``, or ``max_tokens``, its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, **given: Any) -> SamplingParams:
        """The parameters. Raises :class:`InvalidRequest` naming a value out of range."""
        values = {row.name: value for row in _ROWS if (value := getattr(self, row.name)) is not None}
        fixed = {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "logit_bias": self._logit_bias(),
            "structured_outputs": self.wanted_outputs(),
        }
        return SamplingParams(**(values | given | fixed))

    def request(self, prompt: str | Sequence[int], params: SamplingParams, **given: Any) -> GenerationRequest:
        """The request for one prompt."""
        speculation = self.speculation or Speculation()
        return GenerationRequest(
            prompt=prompt,
            params=params,
            model=self.model or "",
            rule=None if speculation.verification is None else Rule(speculation.verification),
            num_speculative_tokens=speculation.num_speculative_tokens,
            method=speculation.method_name,
            session_id=self.session_id or "",
            prompt_cache_key=self.prompt_cache_key or "",
            cache_salt=self.cache_salt or "",
            prediction=self.read.prediction,
            return_token_metrics=bool(self.return_token_metrics),
            outputs_field=self.outputs_field,
            **given,
        )

    def wanted_outputs(self) -> StructuredOutputsParams | None:
        """What the text must look like. Raises :class:`InvalidRequest` where fields ask for different texts."""
        with asked_by(self.outputs_field):
            guided = {kind: getattr(self, f"guided_{kind}") for kind in ("choice", "grammar", "json", "regex")}
            return structured_outputs_of(self.response_format, self.structured_outputs, guided)

    @property
    def outputs_field(self) -> str:
        """The first field that says what the text must look like; empty where none does."""
        return next((name for name in _OUTPUTS if getattr(self, name) not in (None, {"type": "text"})), "")

    def _logit_bias(self) -> dict[int, float]:
        result = {}
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > MAX_TOKEN_ID_DIGITS:
                raise InvalidRequest(f"logit_bias has the key {quote(token)}; keys are token ids", param="logit_bias")
            result[int(token)] = bias
        return result


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    _read_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[str | TokenIds | Texts | Annotated[list[TokenIds], FAIL_FAST], FILLED]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: RefusedField = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, always as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list; give at least one prompt", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    _read_fields: ClassVar[tuple[str, ...]] = ("messages", "chat_template_kwargs", "documents", "tools", "tool_choice")

    messages: Annotated[list[Message], FAIL_FAST, FILLED]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # For chat templates that read them.
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    # vLLM's: false leaves the thoughts out of the answer.
    include_reasoning: bool | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: IgnoredField = None
    # What would change the answer.
    audio: RefusedField = None
    chat_template: Annotated[Any, Refused(hint="start the gateway with --chat-template")] = None
    continue_final_message: RefusedField = None
    echo: RefusedField = None
    function_call: Annotated[Any, Refused(("none",), hint="give tools and tool_choice")] = None
    functions: Annotated[Any, Refused(hint="give tools")] = None
    modalities: Annotated[Any, Refused((["text"],))] = None
    verbosity: Annotated[Any, Refused(("medium",))] = None
    web_search_options: RefusedField = None

    _plan: ReplyPlan = PrivateAttr()

    @property
    def plan(self) -> ReplyPlan:
        """How the answer is read."""
        return self._plan

    def keep_plan(self, plan: ReplyPlan) -> None:
        """Set :attr:`plan`."""
        self._plan = plan

    def ignored(self) -> Iterator[str]:
        """The names of the given fields that have no effect, those of messages included."""
        yield from super().ignored()
        for message in self.messages:
            yield from message.ignored()

    def num_logprobs(self) -> int | None:
        """Log-probabilities per position; None where none are asked for."""
        top = self.top_logprobs
        if top and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if top is not None and not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs is {quote(top)}, outside [0, {MAX_LOGPROBS}]", param="top_logprobs")
        return (top or 0) if self.logprobs else None

    def variables(self, known: Set[str]) -> tuple[dict[str, Any], list[str]]:
        """The chat template's own variables, ``known`` being those it reads; and the given fields it does not read."""
        given = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        given = {name: value for name, value in given.items() if value is not None}
        if "documents" in given and "documents" not in known:
            raise InvalidRequest("documents is not supported: the chat template does not read it; leave it out",
                                 param="documents")  # fmt: skip
        return (given | (self.chat_template_kwargs or {}), [name for name in given if name not in known])


class AnsweredBody(Body):
    """A body whose answer is made where it is read."""

    model: str | None = None

    _answer: bytes = PrivateAttr()

    @property
    def answer(self) -> bytes:
        """The answer, as JSON."""
        return self._answer

    def with_answer(self, answer: bytes) -> Self:
        """Set :attr:`answer`."""
        self._answer = answer
        return self


class TokenizeBody(AnsweredBody):
    """``POST /tokenize``: a prompt, or messages."""

    prompt: Annotated[str | None, MEANINGFUL] = None
    messages: Annotated[list[Message], FAIL_FAST] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(AnsweredBody):
    """``POST /detokenize``."""

    tokens: TokenIds
