"""Who calls over gRPC."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import grpc.aio

from gateway.access.caller import calling
from gateway.access.keys import KeyRing


def enter_call(keys: KeyRing, context: grpc.aio.ServicerContext[Any, Any]) -> AbstractContextManager[None]:
    """Serve a call in its caller's name.

    Raises:
        Unauthenticated: a key is asked for, and the metadata ``authorization`` holds none that is known here.
    """
    sent = dict(context.invocation_metadata() or ()).get("authorization")
    return calling(
        keys.caller(sent.decode("latin-1") if isinstance(sent, bytes) else sent, _address_of(context.peer()))
    )


def _address_of(peer: str) -> str:
    """``ipv4:10.0.0.1:4711`` → ``10.0.0.1``, ``ipv6:%5B::1%5D:4711`` → ``::1``; other kinds as they are."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
