"""Errors in Anthropic's shape, for the paths of its API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_PATH: Final = "/v1/messages"
#: HTTP status → type; others are those of 400 and 500.
_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Names of fields of a chat, as errors name them, and what they are here.
_NAMES: Final[Mapping[str | None, str]] = {"response_format": "output_config.format"}


def is_anthropics(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def anthropic_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The body of an error, made from OpenAI's. It is that of an event, too."""
    kind = _TYPES.get(status) or _TYPES[500 if status >= 500 else 400]
    message, param = body["error"]["message"], body["error"]["param"]
    if (here := _NAMES.get(param)) is not None:
        message = message.replace(param, here, 1)
    return {"type": "error", "error": {"type": kind, "message": message}}
