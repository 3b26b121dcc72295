"""A target service over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from gateway.backends.info import ServerInfo
from specdec import codec
from specdec.errors import Unavailable
from specdec.rpc.streams import SessionStream
from specdec.sessions import Proposal, SessionSpec, TargetOpened, Verdict
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import target_service_pb2_grpc as pb_grpc


class GrpcTarget(ServerInfo):
    """Opens sessions on one target replica."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = pb_grpc.TargetServiceStub(channel)
        super().__init__(self._stub.GetModelInfo)

    async def open(self, spec: SessionSpec) -> GrpcTargetSession:
        """Admit and prefill; returns once the first token is there. Cancelling leaves nothing behind."""
        stream: SessionStream[pb.VerifyRequest, pb.VerifyResponse] = SessionStream(self._stub.Verify)
        try:
            await stream.send(pb.VerifyRequest(open=codec.encode_open_target(spec)))
            answer = await stream.receive()
            if answer.WhichOneof("kind") != "opened":
                raise Unavailable("the target answered an opening with something else")
            opened = codec.decode_target_opened(answer.opened)
            session = GrpcTargetSession(stream, spec, opened)
            session.first = await session.receive(len(spec.token_ids))
        except BaseException:
            await stream.close()
            raise
        return session


class GrpcTargetSession:
    """One open stream."""

    #: The verdict of prefilling: the first token.
    first: Verdict

    def __init__(
        self, stream: SessionStream[pb.VerifyRequest, pb.VerifyResponse], spec: SessionSpec, opened: TargetOpened
    ) -> None:
        self._stream = stream
        self._epoch = spec.epoch
        #: Verdicts up to this length come without being asked for: the opening asked already.
        self._ahead_until = len(spec.token_ids) + 1 + spec.decode_ahead_tokens
        self.opened = opened

    async def verify(self, committed_len: int, proposal: Proposal | None) -> Verdict:
        """Verify one proposal (None or empty: one plain step)."""
        message = pb.Round(
            epoch=self._epoch,
            committed_len=committed_len,
            proposal=codec.encode_proposal(proposal) if proposal is not None else None,
        )
        await self._stream.send(pb.VerifyRequest(round=message))
        return await self.receive(committed_len)

    async def decode_ahead(self, committed_len: int, num_tokens: int) -> AsyncIterator[Verdict]:
        """Decode up to ``num_tokens`` tokens without proposals."""
        end = committed_len + num_tokens
        if end > self._ahead_until:
            message = pb.DecodeAhead(epoch=self._epoch, committed_len=committed_len, num_tokens=num_tokens)
            await self._stream.send(pb.VerifyRequest(decode_ahead=message))
        while committed_len < end:
            verdict = await self.receive(committed_len)
            committed_len = verdict.committed_len
            yield verdict
            if verdict.finish_reason is not None:
                return

    async def close(self) -> None:
        """Release (or park) the cache. Idempotent."""
        await self._stream.close()

    async def receive(self, committed_len: int) -> Verdict:
        """The verdict for a length; others are stale and dropped."""
        while True:
            answer = await self._stream.receive()
            if answer.WhichOneof("kind") != "verdict":
                continue
            message = answer.verdict
            if message.epoch == self._epoch and message.base_len == committed_len:
                return codec.decode_verdict(message)
