"""One session over one bidirectional stream, from the client's side: turns, timeouts, and errors as domain errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from specdec.errors import Cancelled, DeadlineExceeded, InvalidRequest, TandemError, Unavailable
from specdec.rpc.channel import MAX_MESSAGE_BYTES
from specdec.rpc.status import being_cancelled, error_from_rpc
from specdec.rpc.stream_writer import StreamWriter

#: What gRPC reports for a write on a stream whose server is gone; the cause is not known to it at that moment.
WRITE_FAILED: Final = "Internal error from Core"

Q = TypeVar("Q", bound=Message)  # request message
R = TypeVar("R")  # response message


class SessionStream(Generic[Q, R]):
    """A bidirectional call as request/response turns. Use it as ``async with``: leaving cancels the call.

    Every failure is a :class:`TandemError`: what the peer raised, :class:`Unavailable` when the connection is lost or
    the peer ends the stream (the end of a stream never means success), :class:`DeadlineExceeded` when time is up.
    After any error but the DeadlineExceeded of ``receive(timeout_s=…)`` the stream is over.
    """

    def __init__(
        self, method: Callable[..., Any], *, timeout_s: float | None = None, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Start the call. ``method`` is a stub's bidirectional method; ``timeout_s`` the deadline of the whole stream.

        gRPC does not pass deadlines on by itself: a server that calls further gives its ``context.time_remaining()``.
        """
        self._call: grpc.aio.StreamStreamCall[Q, R] = method(timeout=timeout_s, metadata=tuple(metadata) or None)
        self._pending: asyncio.Task[R] | None = None
        self._outlet: StreamWriter[Q] = StreamWriter(lambda message: self._guarded(self._call.write(message)))

    def post(self, message: Q) -> None:
        """Send one message without waiting; messages go out in order. Where that fails, the next receive says why."""
        if (size := message.ByteSize()) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}; send less")
        self._outlet.post(message)

    async def send(self, message: Q) -> None:
        """Send one message and wait until it has left."""
        self.post(message)
        await self._outlet.drain()

    async def receive(self, timeout_s: float | None = None) -> R:
        """The next message. After a timeout (DeadlineExceeded) the stream lives on and the message may be asked for
        again; without one, cancelling the caller cancels the call.
        """
        if timeout_s is None and self._pending is None:
            return await self._read()
        if self._pending is None:
            self._pending = asyncio.create_task(self._read())
        pending = self._pending
        done, _ = await asyncio.wait((pending,), timeout=timeout_s)
        if not done:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        self._pending = None
        return pending.result()

    async def turn(self, message: Q, timeout_s: float | None = None) -> R:
        """Send a message and return the next one."""
        await self.send(message)
        return await self.receive(timeout_s)

    def cancel(self) -> None:
        """End the call at once. The server sees a cancellation and releases the session."""
        self._call.cancel()

    async def close(self) -> None:
        """Cancel the call and wait until it is torn down. Idempotent, never raises."""
        self._call.cancel()
        await self._outlet.close()
        if (pending := self._pending) is not None:
            self._pending = None
            pending.cancel()
            with suppress(TandemError, asyncio.CancelledError):
                await pending

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self) -> R:
        message: R = await self._guarded(self._call.read())
        if message is grpc.aio.EOF:
            raise Unavailable("the server ended the session")
        return message

    async def _guarded(self, operation: Awaitable[Any]) -> Any:
        try:
            return await operation
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL and error.details() == WRITE_FAILED:
                raise Unavailable("the connection to the server was lost") from None
            raise error_from_rpc(error) from None
        except asyncio.InvalidStateError:
            raise Unavailable("the session's stream is over") from None
        except asyncio.CancelledError:
            if being_cancelled() or not self._call.cancelled():
                raise
            # The call was cancelled, not the caller: gRPC raises the same for both.
            raise Cancelled("the session's stream was cancelled") from None


async def call_unary(
    method: Callable[..., Any], request: Any, *, timeout_s: float | None = None, wait_for_ready: bool = False
) -> Any:
    """A unary call whose failure is a domain error. ``wait_for_ready`` waits for the server to come up."""
    try:
        return await method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
