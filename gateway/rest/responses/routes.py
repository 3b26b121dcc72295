"""``/v1/responses``: a chat whose earlier messages the gateway keeps."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.access.caller import current_caller
from gateway.generation import SMALL_REQUEST, Generation
from gateway.rest.answers import name_ignored
from gateway.rest.chat import Chat
from gateway.rest.errors import body_of
from gateway.rest.events import EventResponse, encode_named_event, while_connected
from gateway.rest.json_bytes import encode_json
from gateway.rest.reading import read_chat
from gateway.rest.responses.events import ResponseWriter
from gateway.rest.responses.items import list_items
from gateway.rest.responses.schemas import CHAT_NAMES, ResponseBody
from gateway.rest.responses.store import ResponseStore, StoredResponse
from gateway.rest.schemas import ChatBody
from specdec.errors import InvalidRequest, NotFound, Overloaded


async def create_response(
    store: ResponseStore, generation: Generation, body: ResponseBody, request: Request
) -> Response:
    """Answer ``POST /v1/responses``."""
    call = ResponseCall(generation, store, body)
    with _named_here():
        await call.prepare(request)
    headers = name_ignored(body.ignored())
    if body.stream:
        return EventResponse(call.events(), headers, encode=encode_named_event, end=b"", describe=call.fail)
    content = await while_connected(request.receive, call.answer())
    return Response(content, media_type="application/json", headers=headers)


async def get_response(store: ResponseStore, request: Request) -> Response:
    """Answer ``GET /v1/responses/{id}``."""
    if request.query_params.get("stream", "false") != "false":
        raise InvalidRequest("stream is not supported: what is kept is complete; leave it out", param="stream")
    return Response(_stored(store, request).content, media_type="application/json")


async def delete_response(store: ResponseStore, request: Request) -> Response:
    """Answer ``DELETE /v1/responses/{id}``."""
    response_id = request.path_params["response_id"]
    store.delete(current_caller().key, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def get_input_items(store: ResponseStore, request: Request) -> Response:
    """Answer ``GET /v1/responses/{id}/input_items``."""
    return JSONResponse(list_items(_stored(store, request), request.query_params))


async def cancel_response(store: ResponseStore, request: Request) -> NoReturn:
    """Answer ``POST /v1/responses/{id}/cancel``: what is kept is complete."""
    _stored(store, request)
    raise InvalidRequest(
        "the response is complete; one in progress ends when its connection is closed, and background is not supported",
        param="response_id",
    )


def _stored(store: ResponseStore, request: Request) -> StoredResponse:
    return store.get(current_caller().key, request.path_params["response_id"])


class ResponseCall:
    """One call: the conversation that it continues, and its answer."""

    def __init__(self, generation: Generation, store: ResponseStore, body: ResponseBody) -> None:
        """Raises :class:`InvalidRequest` where the response to continue is not kept here."""
        self._generation = generation
        self._store = store
        self._body = body
        self._owner = current_caller().key
        self._id = f"resp_{secrets.token_hex(24)}"
        self._earlier: tuple[bytes, ...] = ()
        #: The whole response, as JSON, where it is kept.
        self._content = b""
        self._is_kept = body.store is not False and store.max_bytes > 0
        # Responses that continue each other share the caches of one session.
        self._session_id = (body.prompt_cache_key or self._id) if self._is_kept else ""
        if body.previous_response_id is not None:
            try:
                previous = store.get(self._owner, body.previous_response_id)
            except NotFound as error:
                raise InvalidRequest(str(error), param="previous_response_id") from None
            self._earlier, self._session_id = previous.messages, previous.session_id

    async def prepare(self, request: Request) -> None:
        """Read the chat that the body asks for. Raises what reading a chat does."""
        raw, most = self._body.chat(self._earlier, self._session_id), self._generation.max_body_bytes
        if len(raw) > most:
            raise InvalidRequest(
                f"the conversation has {len(raw)} bytes, above the limit of {most} (--max-body-bytes); begin a new one",
                param="input",
            )
        with self._generation.buffers.request(current_caller().client) as buffer:
            buffer.add(len(raw))
            reading = self._generation.read(read_chat, raw, buffer)
            body = await (reading if len(raw) <= SMALL_REQUEST else while_connected(request.receive, reading))
        self._chat = Chat(self._generation, body, request)
        self._writer = ResponseWriter(self._response(body))

    async def answer(self) -> bytes:
        """The whole response, as JSON."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._content or encode_json(self._writer.response)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream."""
        writer, finish_reason, has_begun = self._writer, "stop", False
        with _named_here():
            async with aclosing(self._chat.events()) as pieces:
                async for piece in pieces:
                    if not has_begun:  # errors before this have their own status
                        has_begun = True
                        for event in writer.begin():
                            yield event
                    for choice in piece["choices"]:
                        for event in writer.add(choice):
                            yield event
                        finish_reason = choice["finish_reason"] or finish_reason
                    if not piece["choices"]:
                        writer.response |= {"usage": _usage(piece["usage"]), "metrics": piece["metrics"]}
        writer.response["completed_at"] = int(time.time())
        for event in writer.end(finish_reason):
            if event.get("response") is writer.response:
                self._keep()  # before the client can ask for it
            yield event

    def fail(self, error: Exception) -> dict[str, Any]:
        """The last event of a stream that an error ends: the response has failed."""
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        return self._writer.fail(code, body_of(error)[1]["error"]["message"])

    def _keep(self) -> None:
        if not self._is_kept:
            return
        content = encode_json(self._writer.response)
        messages = (*self._earlier, *self._body.messages, encode_json(self._writer.message()))
        kept = StoredResponse(self._id, content, messages, self._session_id, len(self._body.messages))
        if self._store.add(self._owner, kept):
            self._content = content
        else:
            self._writer.response["store"] = False

    def _response(self, chat: ChatBody) -> dict[str, Any]:
        """The response before it has any output: what was asked for."""
        body = self._body
        effort = body.reasoning.effort if body.reasoning else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._generation.check_model(chat.model or ""),
            "output": [],
            # What holds: a call that is required is one unless the request asks for several.
            "parallel_tool_calls": body.parallel_tool_calls is not False and chat.plan.max_calls is None,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": self._is_kept,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


@contextmanager
def _named_here() -> Iterator[None]:
    """Errors name the fields of the response, not those of its chat."""
    try:
        yield
    except InvalidRequest as error:
        name = error.param or ""
        if (here := CHAT_NAMES.get(name)) is None:
            raise
        raise type(error)(re.sub(rf"\b{re.escape(name)}\b", here, str(error)), param=here) from error


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The counts of a chat under the names of responses."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
