"""A draft service over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from gateway.backends.info import ServerInfo
from specdec import codec
from specdec.errors import Unavailable
from specdec.rpc.streams import SessionStream
from specdec.sessions import DraftOpened, Proposal, SessionSpec
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc


class GrpcDraft(ServerInfo):
    """Opens sessions on one draft replica."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.DraftServiceStub(channel)
        super().__init__(self._stub.GetModelInfo)

    async def open(self, spec: SessionSpec) -> GrpcDraftSession:
        """Admit and prefill. Cancelling leaves nothing behind."""
        stream: SessionStream[pb.DraftRequest, pb.DraftResponse] = SessionStream(self._stub.Draft)
        try:
            answer = await stream.turn(pb.DraftRequest(open=codec.encode_open_draft(spec)))
            if answer.WhichOneof("kind") != "opened":
                raise Unavailable("the draft answered an opening with something else")
        except BaseException:
            await stream.close()
            raise
        return GrpcDraftSession(stream, spec.epoch, codec.decode_draft_opened(answer.opened))


class GrpcDraftSession:
    """One open stream."""

    def __init__(
        self, stream: SessionStream[pb.DraftRequest, pb.DraftResponse], epoch: int, opened: DraftOpened
    ) -> None:
        self._stream = stream
        self._epoch = epoch
        self.opened = opened

    async def advance(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int, num_ahead: int = 0) -> None:
        """Send the committed tokens and ask for a proposal; returns when the message is on its way."""
        message = pb.Advance(
            epoch=self._epoch,
            base_len=base_len,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            num_ahead=num_ahead,
        )
        await self._stream.send(pb.DraftRequest(advance=message))

    async def receive(self) -> Proposal:
        """The next proposal of this opening; cancelling the caller ends the stream."""
        while True:
            answer = (await self._stream.receive()).proposal
            if answer.epoch == self._epoch:
                return codec.decode_proposal(answer)

    async def propose(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Commit ``token_ids`` after ``base_len`` and draft after them. Proposals for other lengths are stale."""
        await self.advance(base_len, token_ids, num_draft_tokens)
        while True:
            proposal = await self.receive()
            if proposal.committed_len == base_len + len(token_ids):
                return proposal

    async def close(self) -> None:
        """Release (or park) the cache. Idempotent."""
        await self._stream.close()
