"""The conversation that a request belongs to, and the attachment that drafts for it, as its headers name them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from gateway.access.request_id import MAX_NAME_LENGTH

#: The headers that clients and proxies send, the one that counts first.
SESSION_HEADERS: Final = ("x-session-id", "x-session-affinity", "x-dynamo-session-id")

ATTACHMENT_HEADER: Final = "x-draft-attachment"

_attachment: Final[ContextVar[str]] = ContextVar("attachment", default="")
_hint: Final[ContextVar[str]] = ContextVar("session_hint", default="")


def current_session_hint() -> str:
    """What the headers of the request at hand say; empty: nothing."""
    return _hint.get()


def current_attachment() -> str:
    """The token of the attachment that the headers of the request at hand name; empty: none."""
    return _attachment.get()


def use_session_hint(headers: Mapping[str, str]) -> None:
    """Work for a request with these headers, whose names are in lower case. What is too long for a name is ignored."""
    _attachment.set(headers.get(ATTACHMENT_HEADER, ""))
    hints = (headers.get(name, "") for name in SESSION_HEADERS)
    _hint.set(next((hint for hint in hints if 0 < len(hint) <= MAX_NAME_LENGTH), ""))
