"""One session over one bidirectional stream, from the client's side, with domain errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from specdec.errors import Cancelled, InvalidRequest, Unavailable
from specdec.rpc.channel import MAX_MESSAGE_BYTES
from specdec.rpc.status import being_cancelled, error_from_rpc
from specdec.rpc.stream_writer import StreamWriter

#: What gRPC reports for a write on a stream whose server is gone; the cause is not known to it at that moment.
WRITE_FAILED: Final = "Internal error from Core"
UNDECODABLE: Final = "the server sent a message that cannot be decoded"

Q = TypeVar("Q", bound=Message)  # request message
R = TypeVar("R")  # response message
Q_contra = TypeVar("Q_contra", bound=Message, contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class MessageStream(Protocol[Q_contra, R_co]):
    """A session's messages out and in, over whichever transport. See :class:`SessionStream`."""

    def post(self, message: Q_contra) -> None:
        """Send one message without waiting."""
        ...

    async def receive(self) -> R_co:
        """The next message."""
        ...

    async def exchange(self, message: Q_contra) -> R_co:
        """Send a message and return the next one."""
        ...

    async def close(self) -> None:
        """End the call."""
        ...


class SessionStream(Generic[Q, R]):
    """A bidirectional call as messages out and messages in. Close it in any case.

    Every failure is a :class:`TandemError`: what the peer raised, or :class:`Unavailable` when the connection is lost
    or the peer ends the stream (the end of a stream never means success). After any error the stream is over.
    """

    def __init__(self, method: Callable[[], Any]) -> None:
        """Start the call. ``method`` is a stub's bidirectional method."""
        self._call: grpc.aio.StreamStreamCall[Q, R] = method()
        self._writer: StreamWriter[Q] = StreamWriter(lambda message: self._guarded(self._call.write(message)))

    def post(self, message: Q) -> None:
        """Send one message without waiting; messages leave in order. Where that fails, the next receive says why."""
        if (size := message.ByteSize()) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}; send less")
        self._writer.post(message)

    async def send(self, message: Q) -> None:
        """Send one message and wait until it has left."""
        self.post(message)
        await self._writer.drain()

    async def receive(self) -> R:
        """The next message. Cancelling the caller cancels the call."""
        message: R = await self._guarded(self._call.read())
        if message is grpc.aio.EOF:
            raise Unavailable("the server ended the session")
        if message is None:  # what gRPC makes of bytes that are no message
            raise Unavailable(UNDECODABLE)
        return message

    async def exchange(self, message: Q) -> R:
        """Send a message and return the next one."""
        await self.send(message)
        return await self.receive()

    async def close(self) -> None:
        """Cancel the call and wait until it is torn down. The server releases the session. Idempotent, never raises."""
        self._call.cancel()
        await self._writer.close()

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


async def call_unary(method: Callable[..., Any], request: Any, *, timeout_s: float | None = None) -> Any:
    """A unary call whose failure is a domain error."""
    try:
        answer = await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    if answer is None:
        raise Unavailable(UNDECODABLE)
    return answer
