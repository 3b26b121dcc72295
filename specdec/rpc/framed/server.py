"""Serves the streaming calls of a gRPC server on a Unix domain socket beside it, framed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from specdec.errors import InvalidRequest, Overloaded
from specdec.rpc.call import STATUS_S, Call
from specdec.rpc.framed.connection import FramedConnection
from specdec.rpc.framed.frame import FrameKind, Metadata, encode_json

logger = logging.getLogger(__name__)

#: What the socket's name adds to that of the gRPC socket.
SUFFIX: Final = ".framed"
#: Seconds that a new connection gets for its headers.
HEADERS_TIMEOUT_S: Final = 10.0
#: Connections that wait to be accepted.
_BACKLOG: Final = 1024

#: The handlers of a server's methods by their paths; grpcio's types know none of asyncio's.
Handlers = dict[str, Any]
#: See ``CallInterceptor.guard``.
Guard = Callable[[Any, str], AbstractAsyncContextManager[Call]]


def framed_path(address: str) -> str | None:
    """The path of the framed socket beside the gRPC socket ``unix:/path``; None at other kinds of addresses."""
    return address.removeprefix("unix:") + SUFFIX if address.startswith("unix:/") else None


def has_socket(path: str) -> bool:
    """Whether a server listens there, or did until it was killed."""
    return os.path.exists(path)


def streaming_handlers(add_to_server: Callable[[Any, Any], None], servicer: object) -> Handlers:
    """The bidirectional methods that a generated ``add_…_to_server`` adds, by their paths."""
    methods = _Methods()
    add_to_server(servicer, methods)
    return {path: handler for path, handler in methods.handlers.items() if handler.stream_stream is not None}


class _Methods:
    """Takes handlers as a gRPC server does."""

    def __init__(self) -> None:
        self.handlers: Handlers = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Those without names are not looked at."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        """The methods of one service."""
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class FramedServer:
    """Listens on a socket; each connection is one bidirectional call, served as the gRPC server would serve it."""

    def __init__(self, path: str, handlers: Handlers, guard: Guard, *, max_connections: int) -> None:
        """``guard`` counts and limits a call, and makes statuses of its errors."""
        self.path = path
        self.handlers = handlers
        self.guard = guard
        self._max_connections = max_connections
        self._contexts: set[FramedContext] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; only this user may connect.

        Raises:
            OSError: the path cannot be listened on.
        """
        bound = socket.socket(socket.AF_UNIX)
        try:
            with suppress(FileNotFoundError):
                os.unlink(self.path)  # of a server that was killed
            bound.bind(self.path)
            os.chmod(self.path, 0o600)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: FramedContext(self), sock=bound, backlog=_BACKLOG)
        except BaseException:
            bound.close()
            raise

    async def stop(self) -> None:
        """Close the socket and the connections that are left. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for context in tuple(self._contexts):
            context.end()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def joined(self, context: FramedContext) -> None:
        """A connection is open.

        Raises:
            Overloaded: there are too many.
        """
        self._contexts.add(context)
        if len(self._contexts) > self._max_connections:
            raise Overloaded(f"{self._max_connections} connections are open, which is the limit; try again later")

    def left(self, context: FramedContext) -> None:
        """A connection is closed."""
        self._contexts.discard(context)


class FramedContext(FramedConnection):
    """One call: what its handler uses of a ``grpc.aio.ServicerContext``."""

    def __init__(self, server: FramedServer) -> None:
        super().__init__()
        self._server = server
        self._metadata: Metadata = ()
        self._handler: Any = None
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None

    # --- what handlers and the interceptor use ---

    async def read(self) -> Any:
        """The next message, or ``grpc.aio.EOF``.

        Raises:
            DecodeError: it is none.
        """
        content = await self.next_message()
        return grpc.aio.EOF if content is None else self._handler.request_deserializer(content)

    async def write(self, message: Message) -> None:
        """Send a message; returns once the client's connection has taken most of what waits."""
        self.write_message(message.SerializeToString())
        await self.drain()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Nothing: a framed call has none."""

    def invocation_metadata(self) -> Metadata:
        """What the client sent with the call."""
        return self._metadata

    def peer(self) -> str:
        """Where the client is."""
        return f"unix:{self._server.path}"

    def cancelled(self) -> bool:
        """Whether the client is gone."""
        return self.is_over

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status."""
        self._end_with(code.name, details, trailing_metadata)
        raise grpc.aio.AbortError

    # --- the connection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the headers."""
        super().connection_made(transport)
        self._late = asyncio.get_running_loop().call_later(HEADERS_TIMEOUT_S, self.end)
        try:
            self._server.joined(self)
        except Overloaded as error:
            self._end_with("RESOURCE_EXHAUSTED", str(error))

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """The headers: begin the call."""
        if kind is not FrameKind.HEADERS or self._handler is not None:
            super().on_frame(kind, content)
        try:
            headers = json.loads(content)
            method, metadata = headers["method"], tuple((str(key), str(value)) for key, value in headers["metadata"])
            handler = self._server.handlers.get(method)
        except (ValueError, TypeError, KeyError):
            raise InvalidRequest("the headers of a framed call cannot be read; use one version of Tandem") from None
        if handler is None:
            self._end_with("UNIMPLEMENTED", f"{method!r} is no streaming method of this server")
            return
        self._handler, self._metadata = handler, metadata
        self._drop_timer()
        self._task = asyncio.get_running_loop().create_task(self._serve(method, handler), name=f"framed {method}")

    def on_broken(self, error: InvalidRequest) -> None:
        """Say so, and end what runs."""
        self._end_with("INVALID_ARGUMENT", str(error))
        if self._task is not None:
            self._task.cancel()

    def on_lost(self) -> None:
        """The client is gone."""
        self._server.left(self)
        self._drop_timer()
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, method: str, handler: Any) -> None:
        try:
            async with self._server.guard(self, method) as call:
                await handler.stream_stream(call.messages(), call)
            self._end_with("OK", "")
        except grpc.aio.AbortError:
            pass  # the status was sent
        except asyncio.CancelledError:
            if not self.is_over:  # as gRPC ends a call whose handler is cancelled
                self._end_with("CANCELLED", "the call was cancelled")
        finally:
            self.end()

    def _end_with(self, code: str, text: str, metadata: Metadata = ()) -> None:
        self.write_frame(encode_json(FrameKind.STATUS, code=code, text=text, metadata=[*metadata]))
        self.end()
        asyncio.get_running_loop().call_later(STATUS_S, self.abort_connection)

    def _drop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
