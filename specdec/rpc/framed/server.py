"""Serves the streaming calls of a gRPC server on a Unix domain socket beside it, framed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from specdec.errors import InvalidRequest, Overloaded
from specdec.rpc.call import Call
from specdec.rpc.framed.connection import FramedConnection
from specdec.rpc.framed.frame import FrameKind, Metadata, encode_json

logger = logging.getLogger(__name__)

#: Seconds that a client has for its headers, and to take the status and close; more than its event loop is ever busy.
CLIENT_TIMEOUT_S: Final = 10.0
#: Connections that wait to be accepted.
_BACKLOG: Final = 1024

#: The handlers of a server's methods by their paths; grpcio's types know none of asyncio's.
Handlers = dict[str, Any]
#: See ``CallInterceptor.guard``.
Guard = Callable[[Any, str], AbstractAsyncContextManager[Call]]


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

    def __init__(
        self, path: str, handlers: Handlers, guard: Guard, *, max_connections: int, max_message_bytes: int
    ) -> None:
        """``guard`` counts and limits a call, and makes statuses of its errors."""
        self.path = path
        self.handlers = handlers
        self.guard = guard
        self.max_message_bytes = max_message_bytes
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
                if stat.S_ISSOCK(os.lstat(self.path).st_mode):  # of a server that was killed
                    os.unlink(self.path)
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
        super().__init__(server.max_message_bytes)
        self._server = server
        self._metadata: Metadata = ()
        self._handler: Any = None
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._has_status = False

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
        self._wait_for_client()
        try:
            self._server.joined(self)
        except Overloaded as error:
            self._end_with("RESOURCE_EXHAUSTED", str(error))

    def data_received(self, data: bytes) -> None:
        """Bytes came; none counts after the status."""
        if not self._has_status:
            super().data_received(data)

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """The headers: begin the call."""
        if kind is not FrameKind.HEADERS or self._handler is not None or self._has_status:
            super().on_frame(kind, content)
        try:
            headers = json.loads(content)
            method, metadata = headers["method"], tuple((str(key), str(value)) for key, value in headers["metadata"])
            handler = self._server.handlers.get(method)
        except (ValueError, TypeError, KeyError, RecursionError):
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
        self._cancel()

    def on_lost(self) -> None:
        """The client is gone."""
        self._server.left(self)
        self._drop_timer()
        self._cancel()

    async def _serve(self, method: str, handler: Any) -> None:
        try:
            async with self._server.guard(self, method) as call:
                await handler.stream_stream(call.messages(), call)
            self._end_with("OK", "")
        except grpc.aio.AbortError:
            pass  # the status was sent
        except asyncio.CancelledError:
            self._end_with("CANCELLED", "the call was cancelled")  # as gRPC ends a call whose handler is cancelled
        finally:
            if not self._has_status:
                self.end()

    def _cancel(self) -> None:
        """Cancel the handler once: a second time would interrupt what it releases."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    def _end_with(self, code: str, text: str, metadata: Metadata = ()) -> None:
        """Send the first status; the client closes the connection, see ``frame.py``."""
        if not self._has_status and not self.is_over:
            self._has_status = True
            self.write_frame(encode_json(FrameKind.STATUS, code=code, text=text, metadata=[*metadata]))
            self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Close the connection unless the client does its part in time."""
        self._drop_timer()
        self._late = asyncio.get_running_loop().call_later(CLIENT_TIMEOUT_S, self.abort_connection)

    def _drop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
