"""What Anthropic's paths answer, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from gateway.rest.answer_schemas import Answer, Metrics


class AnsweredText(Answer):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class AnsweredThinking(Answer):
    """Thoughts of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock: TypeAlias = AnsweredText | AnsweredThinking | AnsweredToolUse
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Answer):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class MessageAnswer(Answer):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics | None = None


class MessageEvent(Answer):
    """One event of its stream."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: AnsweredBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    metrics: Metrics | None = None
    error: dict[str, str] | None = None


class InputTokenCount(Answer):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicErrorAnswer(Answer):
    """The body of errors of these paths."""

    type: Literal["error"]
    error: dict[str, str]
