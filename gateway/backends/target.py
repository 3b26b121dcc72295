"""A target service as a backend: its sessions are streams of messages, over gRPC or framed."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio

from gateway.backends.info import ModelServer
from specdec import codec
from specdec.errors import Unavailable
from specdec.hidden_state_buffer import StateBuffer
from specdec.rpc.session_stream import MessageStream
from specdec.types import Proposal, SessionSpec, TargetOpened, Verdict
from specdec.v1 import target_service_pb2 as pb


class GrpcTarget(ModelServer):
    """Opens sessions on one target replica."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        """``address`` is where the channel leads."""
        super().__init__(channel, "specdec.v1.TargetService", address)

    async def open(self, spec: SessionSpec) -> GrpcTargetSession:
        """Admit and prefill; returns once the first token is there. Cancelling leaves nothing behind."""
        stream = await self._stream("Verify", pb.VerifyRequest, pb.VerifyResponse, spec.trace_headers)
        try:
            answer = await stream.exchange(codec.encode_open_target(spec))
            states = StateBuffer()
            while answer.WhichOneof("kind") == "hidden_states":  # of a long prompt, as they are computed
                states.add(codec.decode_verdict_states(answer.hidden_states))
                answer = await stream.receive()
            if answer.WhichOneof("kind") != "opened":
                raise Unavailable("the target answered an opening with something else")
            opened = codec.decode_target_opened(answer.opened)
            session = GrpcTargetSession(stream, spec.epoch, opened, states)
            session.first = await session.receive()
        except BaseException:
            await stream.close()
            raise
        return session


class GrpcTargetSession:
    """One open stream."""

    #: The verdict of prefilling: the first token.
    first: Verdict

    def __init__(
        self,
        stream: MessageStream[pb.VerifyRequest, pb.VerifyResponse],
        epoch: int,
        opened: TargetOpened,
        states: StateBuffer,
    ) -> None:
        """``states``: hidden states that belong to the next verdict."""
        self._stream = stream
        self._epoch = epoch
        self._states = states
        self.opened = opened

    def offer(self, proposal: Proposal, multi_step_tokens: int = 0) -> None:
        """Ask for a round, now or once what the proposal assumes is committed."""
        message = pb.Round(
            epoch=self._epoch,
            committed_len=proposal.committed_len,
            proposal=codec.encode_proposal(proposal),
            multi_step_tokens=multi_step_tokens,
        )
        self._stream.post(pb.VerifyRequest(round=message))

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Ask for up to ``num_tokens`` tokens without proposals."""
        message = pb.MultiStepDecode(epoch=self._epoch, committed_len=committed_len, num_tokens=num_tokens)
        self._stream.post(pb.VerifyRequest(multi_step_decode=message))

    async def receive(self) -> Verdict:
        """The next verdict; those of another epoch are stale and dropped."""
        while True:
            answer = await self._stream.receive()
            kind = answer.WhichOneof("kind")
            if kind == "hidden_states":
                self._states.add(codec.decode_verdict_states(answer.hidden_states))
            elif kind == "verdict" and answer.verdict.epoch == self._epoch:
                verdict = codec.decode_verdict(answer.verdict)
                if earlier := self._states.take():
                    verdict = replace(verdict, hidden_states=(*earlier, *verdict.hidden_states))
                return verdict

    async def close(self) -> None:
        """Release (or park) the cache. Idempotent."""
        await self._stream.close()
