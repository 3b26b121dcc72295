"""Who sent the request at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from specdec.settings import ClientLimits


@dataclass(frozen=True, slots=True)
class Caller:
    """A client. The default is the process itself, which has no limits."""

    #: Name of its API key; empty where no keys are asked for. Sessions belong to it.
    key: str = ""
    #: Whom limits count: the key's name, or the address where there are no keys.
    client: str = ""
    limits: ClientLimits = field(default_factory=ClientLimits)


_caller: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 (frozen)


def current_caller() -> Caller:
    """The caller of the request that the running task works for."""
    return _caller.get()


@contextmanager
def calling(caller: Caller) -> Iterator[None]:
    """Work for a caller. REST and gRPC enter this once they know who calls."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
