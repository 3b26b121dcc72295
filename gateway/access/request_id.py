"""The id of the request at hand, for its answer and the log."""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from typing import Final

#: Characters of a name that a client chooses: of a request or of a session.
MAX_NAME_LENGTH: Final = 256

_request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """The id of the request that the running task works for; a new one where there is none."""
    return _request_id.get() or uuid.uuid4().hex


def use_request_id(wanted: str | None) -> str:
    """Work for a request under the id its client wants. It is drawn where the client wants none, or one that is not
    printable ASCII of 256 characters at most.
    """
    fits = wanted and len(wanted) <= MAX_NAME_LENGTH and wanted.isascii() and wanted.isprintable()
    request_id = wanted if wanted and fits else uuid.uuid4().hex
    _request_id.set(request_id)
    return request_id
