"""Errors in OpenAI's shape: the one place where an exception becomes an HTTP status."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.rest.anthropic_errors import anthropic_error, is_anthropics
from gateway.rest.unknown_paths import say_unknown
from specdec.errors import (
    InvalidRequest,
    Overloaded,
    TandemError,
    Unauthenticated,
    name_of,
    quote,
    status_of,
    text_of,
)

logger = logging.getLogger(__name__)

#: Where the state of a scope keeps why its request was refused: the message, and the name of the error.
REFUSAL: Final = "refusal"


def error_body(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object; ``code`` is the HTTP status, as with vLLM, or OpenAI's name of the error."""
    return {"error": {"message": _utf8(message), "type": kind, "param": param and _utf8(param), "code": code}}


def _utf8(text: str) -> str:
    """Escape halves of surrogate pairs: names of fields come from the client, and JSON can spell halves."""
    return text.encode(errors="backslashreplace").decode()


def body_of(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of any error. The text of an unexpected one stays in the log."""
    status = status_of(error)
    if not isinstance(error, TandemError):
        logger.error("unexpected error while handling a request", exc_info=error)
    param = error.param if isinstance(error, InvalidRequest) else None
    return status.http, error_body(text_of(error), status.openai_type, status.openai_code or status.http, param)


def raw_response(status: HTTPStatus, message: str, kind: str) -> bytes:
    """The bytes of a response after which the connection closes, for errors below HTTP's framework."""
    content = json.dumps(error_body(message, kind, status)).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class ErrorResponse(JSONResponse):
    """An error, whose message and name are also left in the scope's state for the log of requests."""

    def __init__(
        self, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None, *, name: str = ""
    ) -> None:
        """``name``: by default that of the HTTP status, such as ``MethodNotAllowed``."""
        super().__init__(body, status, headers)
        self._content, self._given_headers = body, headers
        self._refusal = body["error"]["message"], name or HTTPStatus(status).phrase.title().replace(" ", "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, in the shape of the API that was called."""
        scope.setdefault("state", {})[REFUSAL] = self._refusal
        if is_anthropics(scope["path"]):
            shaped = anthropic_error(self.status_code, self._content)
            await JSONResponse(shaped, self.status_code, self._given_headers)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def response_of(error: Exception) -> ErrorResponse:
    """The response to an error; overload says when to come again."""
    status, body = body_of(error)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(status, body, headers, name=name_of(error))


async def _on_error(request: Request, error: Exception) -> ErrorResponse:
    return response_of(error)


async def _on_http_error(request: Request, error: HTTPException) -> ErrorResponse:
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    text = str(error.detail)
    if error.status_code == 404:
        served = [route.path for route in request.app.routes if isinstance(route, Route)]
        text = say_unknown(request.url.path, served)
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"{request.method} does not work on {quote(request.url.path)}; use {allowed}"
    body = error_body(text, kind, error.status_code)
    return ErrorResponse(error.status_code, body, error.headers)


#: What an application does with its exceptions. Those of ``Exception`` are raised again after the answer.
HANDLERS: Final[Mapping[Any, Any]] = {TandemError: _on_error, Exception: _on_error, HTTPException: _on_http_error}
