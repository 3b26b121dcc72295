"""The conversation that a request belongs to, as its headers name it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from gateway.access.request_id import MAX_NAME_LENGTH

#: The headers that clients and proxies send, the one that counts first.
SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity", "x-dynamo-session-id")

_hint: Final[ContextVar[str]] = ContextVar("session_hint", default="")


def current_session_hint() -> str:
    """What the headers of the request at hand say; empty: nothing."""
    return _hint.get()


def use_session_hint(headers: Mapping[str, str]) -> None:
    """Work for a request with these headers, whose names are in lower case. What is too long for a name is ignored."""
    hints = (headers.get(name, "") for name in SESSION_HEADERS)
    _hint.set(next((hint for hint in hints if 0 < len(hint) <= MAX_NAME_LENGTH), ""))
