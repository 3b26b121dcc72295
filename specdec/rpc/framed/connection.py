"""One end of a framed call: frames in, frames out, and who waits for either."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, cast

from specdec.errors import InvalidRequest
from specdec.rpc.channel import MAX_MESSAGE_BYTES
from specdec.rpc.framed.frame import FrameKind, FrameParser, encode_frame

#: Bytes of messages that wait for the reader; then nothing more is taken from the peer.
MAX_WAITING_BYTES: Final = 2**20


class FramedConnection(asyncio.Protocol):
    """The frames of one connection. Subclasses take what is no message, and learn of the end."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """``max_message_bytes``: of a message that the peer sends."""
        self._parser = FrameParser(max_message_bytes)
        self._messages: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_paused = False
        self._transport: asyncio.Transport | None = None
        #: Whether the connection is closed. Messages that came before can still be taken.
        self.is_over = False

    # --- for subclasses ---

    def on_frame(self, kind: FrameKind, content: bytes) -> None:
        """A frame that is no message came.

        Raises:
            InvalidRequest: it may not come here.
        """
        raise InvalidRequest(f"{kind.name} may not come here")

    def on_broken(self, error: InvalidRequest) -> None:
        """End the connection: the peer sent what is no frame, or may not come. No frame is taken after this."""
        self.end()

    def on_lost(self) -> None:
        """The connection was closed, by whichever side. Callers that waited go on after this."""

    # --- for its user ---

    def write_frame(self, frame: bytes) -> None:
        """Send a frame; dropped where the connection is over."""
        if not self.is_over and self._transport is not None:
            self._transport.write(frame)

    def write_message(self, message: bytes) -> None:
        """Send a message; dropped where the connection is over."""
        self.write_frame(encode_frame(FrameKind.MESSAGE, message))

    async def drain(self) -> None:
        """Return once the peer has taken nearly all that was sent, or the connection is over."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    async def next_message(self) -> bytes | None:
        """The next message; None once the connection is over. For one caller at a time."""
        if not self._messages and not self.is_over:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._num_waiting_bytes -= len(message)
        if self._is_paused and self._num_waiting_bytes <= MAX_WAITING_BYTES and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return message

    def end(self) -> None:
        """Close the connection once what was sent has left. Idempotent."""
        if self._transport is not None:
            self._transport.close()

    def abort_connection(self) -> None:
        """Close the connection, whatever has not left. Idempotent."""
        if self._transport is not None and not self.is_over:
            self._transport.abort()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop has classes of its own
        # uvloop writes at once what is above this mark, and all else after the callbacks that are ready: text and
        # answers of a whole round would come before the draft's next request.
        self._transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            for kind, content in self._parser.feed(data):
                if kind is FrameKind.MESSAGE:
                    self._messages.append(content)
                    self._num_waiting_bytes += len(content)
                else:
                    self.on_frame(kind, content)
        except InvalidRequest as error:
            self.on_broken(error)
            return
        if self._messages:
            self._wake()
            if self._num_waiting_bytes > MAX_WAITING_BYTES and not self._is_paused and self._transport is not None:
                self._is_paused = True
                self._transport.pause_reading()

    def pause_writing(self) -> None:
        """The peer reads too slowly."""
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """The peer has read."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self.is_over = True
        self.resume_writing()
        self._wake()
        self.on_lost()

    def _wake(self) -> None:
        """Let the caller of :meth:`next_message` look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
