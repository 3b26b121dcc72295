"""The routes of the API: what answers, what is read and answered, and how endpoints with bodies get them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.buffers import RequestBuffer
from gateway.access.caller import current_caller
from gateway.access.session_hint import use_session_hint
from gateway.access.trace_context import CHAT, TEXT_COMPLETION, use_trace_context
from gateway.generation import SMALL_REQUEST, Generation
from gateway.rest.answer_schemas import Answer
from gateway.rest.body import Body
from gateway.rest.events import while_connected
from gateway.rest.messages.reading import read_count_tokens, read_messages
from gateway.rest.messages.schemas import CountTokensBody, MessagesBody
from gateway.rest.reading import read_chat, read_completion, read_detokenize, read_tokenize
from gateway.rest.responses.reading import read_response
from gateway.rest.responses.schemas import ResponseBody
from gateway.rest.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from specdec.errors import Cancelled, InvalidRequest, quote


class ApiRoute(Route):
    """One method of one path, as clients find it in the description; GET does not stand for HEAD."""

    def __init__(
        self,
        method: str,
        path: str,
        name: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        answer: type[Answer] | None,
        *,
        event: type[Answer] | None = None,
        body: type[Body] | None = None,
    ) -> None:
        """``name`` begins the operation's id; ``answer`` None: plain text; ``event``: one of the answer as a stream."""
        super().__init__(path, endpoint, methods=[method], name=name)
        self.method, self.answer, self.event, self.body = method, answer, event, body
        self.methods = {method}  # Starlette would serve HEAD as well, which the description does not have


@dataclass(frozen=True, slots=True)
class _Reading:
    """How the bodies of one kind are read."""

    read: Callable[..., Any]
    #: What the request is in spans; None: it generates nothing.
    operation: str | None = None
    #: Whether reading may render a chat template.
    has_chat: bool = True


_READINGS: Final[Mapping[type[Body], _Reading]] = {
    CompletionBody: _Reading(read_completion, TEXT_COMPLETION, has_chat=False),
    ChatBody: _Reading(read_chat, CHAT),
    ResponseBody: _Reading(read_response, CHAT, has_chat=False),
    MessagesBody: _Reading(read_messages, CHAT),
    CountTokensBody: _Reading(read_count_tokens),
    TokenizeBody: _Reading(read_tokenize),
    DetokenizeBody: _Reading(read_detokenize, has_chat=False),
}


class BodyRoute(ApiRoute):
    """POST with a body, read within limits, a large one by workers. The endpoint gets it, checked, and the request."""

    def __init__(  # noqa: PLR0917 - the columns of a table
        self,
        generation: Generation,
        path: str,
        name: str,
        endpoint: Callable[[Generation, Any, Request], Awaitable[Response]],
        body: type[Body],
        answer: type[Answer],
        event: type[Answer] | None = None,
    ) -> None:
        super().__init__("POST", path, name, self._respond, answer, event=event, body=body)
        self._generation, self._respond_to, self._reading = generation, endpoint, _READINGS[body]

    async def _respond(self, request: Request) -> Response:
        use_session_hint(request.headers)
        operation = self._reading.operation
        if operation is not None:
            use_trace_context(request.headers, operation)
        with nullcontext() if operation is None else self._generation.trace_refusal():
            body = await self._read(request)
        return await self._respond_to(self._generation, body, request)

    async def _read(self, request: Request) -> Any:
        with self._generation.buffers.request(current_caller().client) as buffer:
            raw = await _read_bytes(request, buffer)
            _check_content(raw, request.headers)
            reading = self._generation.read(self._reading.read, raw, buffer, has_chat=self._reading.has_chat)
            return await (reading if len(raw) <= SMALL_REQUEST else while_connected(request.receive, reading))


async def _read_bytes(request: Request, buffer: RequestBuffer) -> bytes:
    """The body of a request, each piece of it counted.

    Raises:
        Cancelled: the client left.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            buffer.add(len(piece))
            body += piece
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    return bytes(body)


def _check_content(raw: bytes, headers: Mapping[str, str]) -> None:
    content_type, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
    if not raw:
        raise InvalidRequest("the body is empty; send a JSON object")
    if encoding.strip().lower() not in ("", "identity"):
        raise InvalidRequest(f"the header Content-Encoding is {quote(encoding)}; send the body as it is")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        given = f"is {quote(content_type)}" if content_type else "is missing"
        raise InvalidRequest(f"the header Content-Type {given}; send application/json")
