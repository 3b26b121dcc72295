"""The exceptions of Tandem and the one table that maps them to gRPC codes and HTTP statuses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final


class TandemError(Exception):
    """Base of every error Tandem raises on purpose; its text is meant for the user."""


class InvalidRequest(TandemError):
    """A value the caller gave is unknown, out of range or contradicts another one.

    ``param`` names the offending field where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together are longer than the model's context."""


class Unauthenticated(TandemError):
    """The caller sent no API key, or one that is not known here."""


class NotFound(TandemError):
    """The named model does not exist here."""


class ModelNotSupported(TandemError):
    """A checkpoint cannot be run correctly, so it is refused at load."""


class StaleSession(TandemError):
    """A message does not fit the session's state; the session must be opened again."""


class Overloaded(TandemError):
    """Queue or memory is full; the request may be repeated after ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TandemError):
    """The request's deadline passed before it was finished."""


class Cancelled(TandemError):
    """The caller went away."""


class Unavailable(TandemError):
    """A service cannot be reached, is draining, or was lost and could not be replaced."""


class InternalError(TandemError):
    """A fault of ours; the text that leaves the process is fixed."""


@dataclass(frozen=True, slots=True)
class Status:
    """The public form of one class of error: a gRPC status name, an HTTP status, an OpenAI error type."""

    grpc: str
    http: int
    openai_type: str
    #: OpenAI's name of the error; empty: it is known by its HTTP status.
    openai_code: str = ""


_STATUS: Final[Mapping[type[TandemError], Status]] = {
    InvalidRequest: Status("INVALID_ARGUMENT", 400, "invalid_request_error"),
    ContextLengthExceeded: Status("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"),
    Unauthenticated: Status("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_api_key"),
    NotFound: Status("NOT_FOUND", 404, "not_found_error"),
    ModelNotSupported: Status("FAILED_PRECONDITION", 400, "invalid_request_error"),
    StaleSession: Status("FAILED_PRECONDITION", 409, "conflict_error"),
    Overloaded: Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504, "timeout_error"),
    Cancelled: Status("CANCELLED", 499, "cancelled_error"),
    Unavailable: Status("UNAVAILABLE", 503, "service_unavailable_error"),
    InternalError: Status("INTERNAL", 500, "internal_server_error"),
}

#: Characters of a value that an error message quotes.
QUOTED_CHARACTERS: Final = 80
#: Bits above which an error message gives the length of a whole number in place of its digits.
QUOTED_BITS: Final = 256


def quote(value: object) -> str:
    """A value as error messages show it: like ``repr``, but short, whatever the value."""
    if isinstance(value, int) and value.bit_length() > QUOTED_BITS:
        sign = "-" if value < 0 else ""
        return f"a number of about {sign}10^{round(value.bit_length() * 0.30103)}"
    if isinstance(value, str) and len(value) > QUOTED_CHARACTERS:
        return f"{value[:QUOTED_CHARACTERS]!r}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * QUOTED_CHARACTERS else f"{text[:QUOTED_CHARACTERS]}…"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy for a name that is not known: the nearest one that is; ``otherwise`` where none is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


#: Text of every INTERNAL error that leaves the process; the cause is in the server's log.
INTERNAL_TEXT: Final = "internal error; the server's log has the cause"


def status_of(error: BaseException) -> Status:
    """The public form of an error; anything that is not a :class:`TandemError` is INTERNAL."""
    for cls in type(error).__mro__:
        if (status := _STATUS.get(cls)) is not None:
            return status
    return _STATUS[InternalError]


def name_of(error: BaseException) -> str:
    """The name of an error in metrics; of an unexpected one nothing leaves the process."""
    return type(error).__name__ if isinstance(error, TandemError) else InternalError.__name__


def text_of(error: BaseException) -> str:
    """The text of an error that may leave the process."""
    if isinstance(error, TandemError) and not isinstance(error, InternalError):
        return str(error)
    return INTERNAL_TEXT


def error_from_status(grpc_name: str, text: str) -> TandemError:
    """The error a peer raised, rebuilt from its gRPC status name and text.

    Codes outside the table (UNKNOWN, ABORTED, …) become :class:`Unavailable`.
    """
    for cls, status in _STATUS.items():
        if status.grpc == grpc_name and cls is not ModelNotSupported:
            return cls(text)
    return Unavailable(f"{grpc_name}: {text}")
