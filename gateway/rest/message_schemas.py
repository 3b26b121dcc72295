"""The messages of a chat, as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import model_validator

from gateway.rest.body import FAIL_FAST, MEANINGFUL, Body, IgnoredField, RefusedField
from specdec.errors import InvalidRequest, quote


class MessagePart(Body):
    """A part of a message's content; text only."""

    path: ClassVar[str] = "messages.content"

    type: Literal["text"]
    text: str
    cache_control: IgnoredField = None
    provider_specific_fields: IgnoredField = None

    @model_validator(mode="before")
    @classmethod
    def check_type(cls, given: Any) -> Any:
        """Refuse what is no text before its fields are looked at."""
        if not isinstance(given, Mapping):
            raise InvalidRequest('messages.content holds a part that is no object; write {"type": "text", "text": …}',
                                 param="messages")  # fmt: skip
        kind = given.get("type")
        if kind != "text":
            what = "without a type" if kind is None else f"of type {quote(kind)}"
            raise InvalidRequest(
                f"messages.content holds a part {what}; this server reads parts of type 'text' only", param="messages"
            )
        if not isinstance(given.get("text"), str):
            raise InvalidRequest("messages.content holds a part of type 'text' without its text", param="messages")
        return given


def read_content(content: Any) -> Any:
    """Parts of a content, not yet checked, as one text; other contents as they are, and none as an empty text."""
    if not isinstance(content, list | tuple):
        return content or ""
    return join_parts([MessagePart.model_validate(part) for part in content])


def join_parts(parts: Iterable[MessagePart]) -> str:
    """The text of a content that was given in parts."""
    return "\n".join(part.text for part in parts)


class CalledFunction(Body):
    """The function of an earlier call."""

    path: ClassVar[str] = "messages.tool_calls.function"

    name: str
    arguments: Annotated[str | dict[str, Any] | None, MEANINGFUL] = None


class EarlierCall(Body):
    """A call of a tool in an earlier answer."""

    path: ClassVar[str] = "messages.tool_calls"

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    # Of the delta that it was made from.
    index: IgnoredField = None
    provider_specific_fields: IgnoredField = None

    def as_template(self) -> dict[str, Any]:
        """What a chat template gets."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id or "", "type": "function", "function": function}


class Message(Body):
    """A message of a conversation."""

    path: ClassVar[str] = "messages"

    role: str
    content: str | Annotated[list[MessagePart], FAIL_FAST] | None = None
    name: str | None = None
    # Earlier thoughts of the model, for chat templates that read them.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Of earlier answers, and of messages with the role tool.
    tool_calls: Annotated[list[EarlierCall], FAIL_FAST] | None = None
    tool_call_id: str | None = None
    # What clients send back of earlier answers, and their notes.
    annotations: IgnoredField = None
    cache_control: IgnoredField = None
    id: IgnoredField = None
    provider_specific_fields: IgnoredField = None
    reasoning_details: IgnoredField = None
    thinking_blocks: IgnoredField = None
    # What would change the answer.
    audio: RefusedField = None
    function_call: RefusedField = None
    refusal: RefusedField = None

    def ignored(self) -> Iterator[str]:
        """The names of the given fields that have no effect, those of parts included."""
        yield from super().ignored()
        for part in self.content or () if not isinstance(self.content, str) else ():
            yield from part.ignored()
        for call in self.tool_calls or ():
            yield from call.ignored()

    def as_template(self) -> dict[str, Any]:
        """What a chat template gets: content as one text."""
        content = self.content or ""
        if not isinstance(content, str):
            content = join_parts(content)
        result: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            result["tool_calls"] = [call.as_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            result["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            result["name"] = self.name
        if thoughts := self.reasoning_content or self.reasoning:
            result["reasoning_content"] = thoughts
        return result
