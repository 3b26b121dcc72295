"""A draft's stream within the stream of the target's session: the gateway passes its messages on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from specdec.errors import Unavailable
from specdec.v1 import draft_service_pb2 as pb


class RelayedStream:
    """A :class:`~specdec.rpc.session_stream.MessageStream` to a draft that only the gateway reaches."""

    def __init__(self, session: int, send: Callable[[pb.RelayedRequest], None]) -> None:
        """``session``: its number, by which answers are told from those of earlier drafts."""
        self.session = session
        self._send = send
        self._answers: asyncio.Queue[pb.RelayedResponse] = asyncio.Queue()
        self._is_open = True

    def post(self, message: pb.DraftRequest) -> None:
        """Send one message without waiting."""
        if self._is_open:
            self._send(pb.RelayedRequest(session=self.session, request=message))

    def take(self, answer: pb.RelayedResponse) -> None:
        """An answer came; one of another session is dropped."""
        if self._is_open and answer.session == self.session:
            self._answers.put_nowait(answer)

    async def receive(self) -> pb.DraftResponse:
        """The next message.

        Raises:
            Unavailable: the draft has left, or cannot draft.
        """
        answer = await self._answers.get()
        if answer.error:
            raise Unavailable(answer.error)
        return answer.response

    async def exchange(self, message: pb.DraftRequest) -> pb.DraftResponse:
        """Send a message and return the next one."""
        self.post(message)
        return await self.receive()

    async def close(self) -> None:
        """Tell the draft that the session is over. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._send(pb.RelayedRequest(session=self.session))
