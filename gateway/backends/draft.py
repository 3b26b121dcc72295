"""A draft service as a backend: its sessions are streams of messages, over gRPC or framed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import grpc.aio

from gateway.backends.info import ModelServer
from specdec import codec, trees
from specdec.errors import Unavailable
from specdec.hidden_state_buffer import pieces
from specdec.rpc.session_stream import MessageStream
from specdec.types import DraftOpened, HiddenStates, Proposal, SessionSpec
from specdec.v1 import draft_service_pb2 as pb


class GrpcDraft(ModelServer):
    """Opens sessions on one draft replica."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        """``address`` is where the channel leads."""
        super().__init__(channel, "specdec.v1.DraftService", address)

    async def open(self, spec: SessionSpec) -> GrpcDraftSession:
        """Admit and prefill. Cancelling leaves nothing behind."""
        stream = await self._stream("Draft", pb.DraftRequest, pb.DraftResponse, spec.trace_headers)
        try:
            answer = await stream.exchange(codec.encode_open_draft(spec))
            if answer.WhichOneof("kind") != "opened":
                raise Unavailable("the draft answered an opening with something else")
        except BaseException:
            await stream.close()
            raise
        return GrpcDraftSession(stream, codec.decode_draft_opened(answer.opened))


class GrpcDraftSession:
    """One open stream."""

    def __init__(self, stream: MessageStream[pb.DraftRequest, pb.DraftResponse], opened: DraftOpened) -> None:
        self._stream = stream
        self._arrived: deque[Proposal] = deque()
        self.opened = opened

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        num_ahead_proposals: int = 0,
        hidden_states: Sequence[HiddenStates] = (),
    ) -> None:
        """Commit tokens and ask for a proposal; returns at once.

        Hidden states that are too large for its message are sent before it.
        """
        states = [codec.encode_hidden_states(piece) for piece in pieces(hidden_states)]
        for piece in states[:-1]:
            self._stream.post(pb.DraftRequest(hidden_states=piece))
        message = pb.Advance(
            epoch=self.opened.epoch,
            base_len=base_len,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            num_ahead_proposals=num_ahead_proposals,
            hidden_states=states[-1:],
        )
        self._stream.post(pb.DraftRequest(advance=message))

    async def receive(self) -> Proposal:
        """The next proposal, whose parts fit each other. After it is cancelled the session must be closed.

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
        """Release (or park) the cache. Idempotent."""
        await self._stream.close()
