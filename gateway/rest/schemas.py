"""The bodies of the REST API: OpenAI's fields, and vLLM's beside them. A field that is not here is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from gateway.text.tokenizer import encodable
from gateway.types import GenerationRequest
from specdec.errors import InvalidRequest, quote
from specdec.params import SamplingParams, parameters
from specdec.rules import Rule

TokenId = Annotated[int, Field(ge=0)]
#: Digits of the largest token id of a message, 2^32 - 1.
MAX_TOKEN_ID_DIGITS: Final = 10
if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(str(rule) for rule in Rule)]

#: OpenAI's fields that change nothing here, and the values that mean "not used". Any other value is refused.
UNUSED_COMPLETION: Final[Mapping[str, tuple[Any, ...]]] = {"suffix": (None, "")}
UNUSED_CHAT: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
#: The same for both endpoints.
UNUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
}


class Body(BaseModel):
    """No unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="after")
    @classmethod
    def check_text(cls, value: Any) -> Any:
        """Refuse text that cannot be passed on or given back."""
        if not _all_encodable(value):
            raise ValueError("holds half a surrogate pair, which is no character")
        return value


def _all_encodable(value: Any) -> bool:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return all(_all_encodable(key) and _all_encodable(item) for key, item in value.items())
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return all(map(_all_encodable, value))
    return True


class StreamOptions(Body):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Speculation(Body):
    """Switches of speculation for one request."""

    num_speculative_tokens: int | None = None
    verification: RuleName | None = None


#: The sampling parameters of both endpoints, and the JSON types of those whose Python type JSON does not have.
_ROWS: Final = tuple(row for row in parameters() if row.in_rest)
_JSON_TYPES: Final[Mapping[Any, Any]] = {
    Sequence[int]: list[TokenId],
    Sequence[str]: list[str],
    str | Sequence[str]: str | list[str],
    Mapping[int, float]: dict[str, float],
}

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
        **{row.name: (_JSON_TYPES.get(row.type, row.type) | None, None) for row in _ROWS},
    )


class SamplingBody(SamplingFields):
    """The fields of both endpoints: the sampling parameters and more. ``None`` always means the default."""

    unused: ClassVar[Mapping[str, tuple[Any, ...]]] = UNUSED

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # For whom and for what cache: accepted, without effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # OpenAI's fields that are refused unless unused.
    metadata: Any = None
    service_tier: Any = None
    store: Any = None
    # vLLM's.
    add_special_tokens: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    # Tandem's.
    session_id: str | None = None
    speculation: Speculation | None = None

    def check_unused(self) -> None:
        """Refuse fields that have no effect here, unless they ask for nothing."""
        for name, allowed in self.unused.items():
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidRequest(f"{name} is not supported; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, *, max_tokens: int | None, logprobs: int | None, **given: Any) -> SamplingParams:
        """The parameters. Raises :class:`InvalidRequest` naming a value out of range."""
        values = {row.name: value for row in _ROWS if (value := getattr(self, row.name)) is not None}
        fixed = {"max_tokens": max_tokens, "logprobs": logprobs, "logit_bias": self._logit_bias()}
        return SamplingParams(**(values | given | fixed))

    def request(self, prompt: str | list[int], params: SamplingParams, **given: Any) -> GenerationRequest:
        """The request for one prompt."""
        speculation = self.speculation or Speculation()
        return GenerationRequest(
            prompt=prompt,
            params=params,
            model=self.model or "",
            rule=None if speculation.verification is None else Rule(speculation.verification),
            num_speculative_tokens=speculation.num_speculative_tokens,
            session_id=self.session_id or "",
            **given,
        )

    def _logit_bias(self) -> dict[int, float]:
        result = {}
        for token, bias in (self.logit_bias or {}).items():
            if not token.isdecimal() or len(token) > MAX_TOKEN_ID_DIGITS:
                raise InvalidRequest(f"logit_bias has the key {quote(token)}; keys are token ids", param="logit_bias")
            result[int(token)] = bias
        return result


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    unused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNUSED, **UNUSED_COMPLETION}

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, always as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt is an empty list; give at least one prompt", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class MessagePart(Body):
    """A part of a message's content; text only."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: str
    content: str | list[MessagePart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: list[Any] | None = None

    def as_template(self) -> dict[str, Any]:
        """What a chat template gets: content as one text."""
        if self.tool_calls:
            raise InvalidRequest("messages hold tool_calls, which are not supported", param="messages")
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": content, **named}


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    unused: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNUSED, **UNUSED_CHAT}

    messages: list[Message]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # No tools here, so nothing is ever called in parallel.
    parallel_tool_calls: bool | None = None
    # OpenAI's fields that are refused unless unused.
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def num_logprobs(self) -> int | None:
        """Log-probabilities per position; None where none are asked for."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[TokenId]
