"""A limit on the size of bodies, before anything is read into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.rest.errors import ErrorResponse, error_body

#: Bytes of a refused body that are read before the answer is sent regardless.
MAX_DISCARDED_BYTES: Final = 128 * 2**20


class BodyLimit:
    """ASGI middleware that answers 413 to bodies above the limit, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on unless its body is too large."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_bytes()
        text = f"the body is above the limit of {most} bytes (--max-body-bytes); send a smaller one"
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > most:
            await self._discard(receive, {"more_body": True})
            await self._refuse(text, scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                await self._discard(receive, message)
                raise HTTPException(413, text)
            return message

        await self._app(scope, counted, send)

    async def _discard(self, receive: Receive, message: Message) -> None:
        """Read on for a while and keep nothing: a client still sending sees a broken connection, not the answer."""
        seen = 0
        while message.get("more_body") and seen < MAX_DISCARDED_BYTES:
            message = await receive()
            seen += len(message.get("body", b""))

    async def _refuse(self, text: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = error_body(text, "invalid_request_error", 413)
        await ErrorResponse(413, body, {"Connection": "close"})(scope, receive, send)
