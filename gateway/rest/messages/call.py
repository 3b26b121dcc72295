"""``POST /v1/messages``: a chat, answered in Anthropic's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.access.request_id import current_request_id
from gateway.generation import Generation
from gateway.rest.anthropic_errors import anthropic_error
from gateway.rest.chat import Chat
from gateway.rest.errors import body_of
from gateway.rest.events import EventResponse, encode_named_event, while_connected
from gateway.rest.messages.events import MessageWriter
from gateway.rest.messages.schemas import MessagesBody


async def create_message(generation: Generation, body: MessagesBody, request: Request) -> Response:
    """Answer one call."""
    call = MessageCall(generation, body, request)
    if body.stream:
        return EventResponse(
            call.events(),
            call.headers,
            encode=encode_named_event,
            end=b"",
            describe=lambda error: anthropic_error(*body_of(error)),
        )
    return JSONResponse(await while_connected(request.receive, call.answer()), headers=call.headers)


class MessageCall:
    """One call: its chat, and the answer."""

    def __init__(self, generation: Generation, body: MessagesBody, request: Request) -> None:
        """Raises :class:`InvalidRequest` for values that no model could honour."""
        self._chat = Chat(generation, body.prepared, request)
        self._writer = MessageWriter({
            "id": f"msg_{current_request_id()}",
            "type": "message",
            "role": "assistant",
            "model": generation.check_model(body.model or ""),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        })  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return self._chat.headers

    async def answer(self) -> dict[str, Any]:
        """The whole message."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._writer.message

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream."""
        writer, ended, has_begun = self._writer, ("stop", None), False
        async with aclosing(self._chat.events()) as pieces:
            async for piece in pieces:
                if not has_begun:  # errors before this have their own status
                    has_begun = True
                    for event in writer.begin(_usage(piece["usage"])):
                        yield event
                for choice in piece["choices"]:
                    for event in writer.add(choice):
                        yield event
                    if choice["finish_reason"]:
                        ended = choice["finish_reason"], choice["stop_reason"]
                if not piece["choices"]:
                    for event in writer.end(*ended, _usage(piece["usage"]), piece["metrics"]):
                        yield event


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts of a chat under Anthropic's names: cached tokens of the prompt are counted apart."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }
