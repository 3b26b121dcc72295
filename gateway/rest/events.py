"""Answers that end when the client leaves: one JSON object, or a stream of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.rest.errors import body_of, response_of
from gateway.rest.json_bytes import encode_json
from specdec.errors import Cancelled
from specdec.process.logs import log_bug

T = TypeVar("T")

DONE: Final = b"data: [DONE]\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        Cancelled: the client left.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise Cancelled("the client closed the connection")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.wait((worker, watcher))
        log_bug(worker)
    return worker.result()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def encode_event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode_json(content) + b"\n\n"


def encode_named_event(content: dict[str, Any]) -> bytes:
    """One server-sent event that has its type as its name."""
    return f"event: {content['type']}\n".encode() + encode_event(content)


def error_event(error: Exception) -> dict[str, Any]:
    """What OpenAI's streams say of an error."""
    return body_of(error)[1]


class EventResponse(Response):
    """Server-sent events from a generator of JSON objects.

    Nothing is sent before the first event is there, so an error until then has its proper status. A later one is sent
    as an event, since the status is out.
    """

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        headers: Mapping[str, str],
        *,
        encode: Callable[[dict[str, Any]], bytes] = encode_event,
        end: bytes = DONE,
        describe: Callable[[Exception], dict[str, Any]] = error_event,
    ) -> None:
        """``end`` is sent after the last event; ``describe`` makes an event of an error."""
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"} | dict(headers))
        # The body comes in pieces of unknown number.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._encode = encode
        self._end = end
        self._describe = describe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client leaves."""
        try:
            await while_connected(receive, self._send_all(scope, receive, send))
        except Cancelled:
            return

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await response_of(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_piece(send, self._encode(first))
            try:
                async for event in events:
                    await _send_piece(send, self._encode(event))
            except Exception as error:
                await _send_piece(send, self._encode(self._describe(error)))
            await send({"type": "http.response.body", "body": self._end, "more_body": False})


async def _send_piece(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
