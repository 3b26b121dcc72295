"""What ``/v1/responses`` answers, for the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from gateway.rest.answer_schemas import Answer, ChatPosition, Metrics


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatPosition]


class ReasoningText(Answer):
    """The text of thoughts."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(Answer):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Answer):
    """Thoughts of the model."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Answer):
    """A call of a tool."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    #: JSON text.
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Answer):
    """Where tokens of the input came from."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    """What tokens of the output are."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(Answer):
    """Why a response failed."""

    code: str
    message: str


class ResponseAnswer(Answer):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metrics: Metrics | None = None


class ResponseEvent(Answer):
    """One event of its stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[ChatPosition] | None = None


class ResponseDeleted(Answer):
    """The answer to a deletion."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputText(Answer):
    """The text of a message that was given."""

    type: Literal["input_text"]
    text: str


class GivenMessage(Answer):
    """A message that was given."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["user", "assistant", "system"]
    content: list[InputText | OutputText]


class GivenCallOutput(Answer):
    """What a tool answered."""

    type: Literal["function_call_output"]
    id: str
    status: ItemStatus
    call_id: str
    output: str


class InputItems(Answer):
    """A page of the items that a response was asked."""

    object: Literal["list"]
    data: list[GivenMessage | GivenCallOutput | OutputReasoning | OutputCall]
    has_more: bool
    first_id: str | None
    last_id: str | None
