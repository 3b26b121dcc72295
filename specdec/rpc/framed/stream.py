"""One session over one framed call, from the client's side, with domain errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from specdec.errors import InvalidRequest, TandemError, Unavailable
from specdec.rpc.channel import MAX_MESSAGE_BYTES
from specdec.rpc.framed.connection import FramedConnection
from specdec.rpc.framed.frame import FrameKind, Metadata, encode_json
from specdec.rpc.session_stream import UNDECODABLE
from specdec.rpc.status import rebuild_error

Q = TypeVar("Q", bound=Message)  # request message
R = TypeVar("R")  # response message


class FramedStream(FramedConnection, Generic[Q, R]):
    """A :class:`~specdec.rpc.session_stream.MessageStream` over a Unix domain socket."""

    def __init__(self, decode: Callable[[bytes], R]) -> None:
        """Use :meth:`open`."""
        super().__init__()
        self._decode = decode
        #: What ended the call.
        self._error: TandemError | None = None

    @classmethod
    async def open(cls, path: str, method: str, decode: Callable[[bytes], R], metadata: Metadata = ()) -> Self:
        """Connect and begin the call. ``method`` is ``/package.Service/Method``, ``decode`` reads a response.

        Raises:
            FileNotFoundError, ConnectionRefusedError: nobody listens at ``path``.
            Unavailable: it cannot be reached for another reason.
        """
        try:
            _, stream = await asyncio.get_running_loop().create_unix_connection(lambda: cls(decode), path)
        except (FileNotFoundError, ConnectionRefusedError):
            raise
        except OSError as error:
            raise Unavailable(f"the socket {path} cannot be reached: {error.strerror or error}") from error
        stream.write_frame(encode_json(FrameKind.HEADERS, method=method, metadata=[*metadata]))
        return stream

    def post(self, message: Q) -> None:
        """Send one message without waiting; messages leave in order. Where that fails, the next receive says why."""
        if (size := message.ByteSize()) > MAX_MESSAGE_BYTES:
            raise InvalidRequest(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}; send less")
        self.write_message(message.SerializeToString())

    async def receive(self) -> R:
        """The next message."""
        content = await self.next_message()
        if content is None:
            raise self._error or Unavailable("the connection to the server was lost")
        try:
            return self._decode(content)
        except DecodeError:
            raise Unavailable(UNDECODABLE) from None

    async def exchange(self, message: Q) -> R:
        """Send a message and return the next one."""
        self.post(message)
        return await self.receive()

    async def close(self) -> None:
        """End the call, whatever has not left. The server releases the session. Idempotent, never raises."""
        self.give_up(Unavailable("the session's stream is over"))

    def give_up(self, why: TandemError) -> None:
        """End the call; the next receive raises ``why`` unless the call is over already."""
        self._error = self._error or why
        self.abort_connection()

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """The server ends the call."""
        if kind is not FrameKind.STATUS:
            super().on_frame(kind, content)
        try:
            status = json.loads(content)
            if status["code"] == "OK":
                error: TandemError = Unavailable("the server ended the session")
            else:
                error = rebuild_error(status["code"], status["text"], dict(status["metadata"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InvalidRequest("its status cannot be read; use one version of Tandem") from None
        self.give_up(error)

    def on_broken(self, error: InvalidRequest) -> None:
        """The server speaks otherwise."""
        self.give_up(Unavailable(f"{UNDECODABLE}: {error}"))
