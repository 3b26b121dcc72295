"""A session on a draft service, over whichever transport: of a gateway, or of a target that asks the draft itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, Self

import grpc.aio

from specdec import codec, trees
from specdec.errors import Unavailable
from specdec.hidden_state_buffer import pieces
from specdec.rpc.channel_pool import ChannelPool
from specdec.rpc.session_stream import MessageStream, SessionStream
from specdec.types import DraftOpened, HiddenStates, Proposal
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1.draft_service_pb2_grpc import DraftServiceStub

#: The service, and the path of its method.
DRAFT_SERVICE: Final = "specdec.v1.DraftService"
DRAFT_METHOD: Final = f"/{DRAFT_SERVICE}/Draft"

Stream = MessageStream[pb.DraftRequest, pb.DraftResponse]


class RemoteStream(SessionStream[pb.DraftRequest, pb.DraftResponse]):
    """A call to a draft at ``host:port``, over a connection that is its own as long as it lasts."""

    def __init__(
        self, channels: ChannelPool, channel: grpc.aio.Channel, address: str, metadata: Sequence[tuple[str, str]]
    ) -> None:
        """``channel``: of ``channels``, which get it back."""
        self._give_back = partial(channels.give_back, address, channel)
        self._is_open = True
        call = DraftServiceStub(channel).Draft
        super().__init__(lambda: call(metadata=tuple(metadata) or None))

    async def close(self) -> None:
        """End the call, and give the connection back."""
        is_open, self._is_open = self._is_open, False
        await super().close()
        if is_open:
            await self._give_back()


class DraftStream:
    """One open stream. Implements :class:`specdec.backends.DraftSession`."""

    def __init__(self, stream: Stream, opening: pb.DraftRequest) -> None:
        """Send the ``opening``. Advances may follow it before :meth:`wait_opened`."""
        self._stream = stream
        self._epoch = opening.open.epoch
        self._opened: DraftOpened | None = None
        self._arrived: deque[Proposal] = deque()
        stream.post(opening)

    @classmethod
    async def open(cls, stream: Stream, opening: pb.DraftRequest) -> Self:
        """Admit and prefill. Where that fails, or is cancelled, the stream is closed."""
        draft = cls(stream, opening)
        try:
            await draft.wait_opened()
        except BaseException:
            await stream.close()
            raise
        return draft

    async def wait_opened(self) -> None:
        """Wait until it is admitted and has prefilled."""
        if self._opened is not None:
            return
        answer = await self._stream.receive()
        if answer.WhichOneof("kind") != "opened":
            raise Unavailable("the draft answered an opening with something else")
        self._opened = codec.decode_draft_opened(answer.opened)

    @property
    def opened(self) -> DraftOpened:
        """What admission found."""
        assert self._opened is not None, "the draft is still being opened"
        return self._opened

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        hidden_states: Sequence[HiddenStates] = (),
        stream_tokens: int = 0,
    ) -> None:
        """Commit tokens and ask for a proposal; returns at once."""
        self.post_advance(base_len, token_ids, num_draft_tokens, hidden_states, stream_tokens)

    def post_advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        hidden_states: Sequence[HiddenStates] = (),
        stream_tokens: int = 0,
    ) -> None:
        """What :meth:`advance` does. Hidden states that are too large for its message are sent before it."""
        states = [codec.encode_hidden_states(piece) for piece in pieces(hidden_states)]
        for piece in states[:-1]:
            self._stream.post(pb.DraftRequest(hidden_states=piece))
        message = pb.Advance(
            epoch=self._epoch,
            base_len=base_len,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            hidden_states=states[-1:],
            stream_tokens=stream_tokens,
        )
        self._stream.post(pb.DraftRequest(advance=message))

    async def receive(self) -> Proposal:
        """The next proposal, whose parts fit each other. After a cancelled call the stream is of no more use.

        Raises:
            InvalidRequest: they do not.
        """
        if not self._arrived:
            answer = await self._stream.receive()
            for message in (answer.proposal, *answer.more_proposals):
                proposal = codec.decode_proposal(message)
                trees.check(len(proposal.token_ids), proposal.parents, len(proposal.q_rows))
                self._arrived.append(proposal)
        return self._arrived.popleft()

    async def close(self) -> None:
        """Release the cache. Idempotent."""
        await self._stream.close()
