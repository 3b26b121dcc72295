"""A target service as a backend: its sessions are streams of messages, over gRPC or framed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from gateway.backends.info import ModelServer
from specdec import codec
from specdec.backends import DraftRelay, RelayedDraft
from specdec.direct_draft import DirectDraftSession
from specdec.errors import Unavailable
from specdec.hidden_state_buffer import StateBuffer
from specdec.rpc.session_stream import MessageStream
from specdec.rpc.status import error_from_rpc, rebuild_error
from specdec.types import Proposal, SessionSpec, TargetOpened, Verdict
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as pb
from specdec.v1.types_pb2 import StateMapPart


class GrpcTarget(ModelServer):
    """Opens sessions on one target replica."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        """``address`` is where the channel leads."""
        super().__init__(channel, "specdec.v1.TargetService", address)
        self._put_state_map: Callable[[], Any] = channel.stream_unary(
            "/specdec.v1.TargetService/PutStateMap",
            request_serializer=StateMapPart.SerializeToString,
            response_deserializer=pb.PutStateMapResponse.FromString,
        )

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

    async def put_state_map(self, parts: AsyncIterator[StateMapPart]) -> None:
        """See :class:`specdec.backends.StateMapTaker`."""
        call = self._put_state_map()
        try:
            with suppress(asyncio.InvalidStateError):  # it has answered already
                async for part in parts:
                    await call.write(part)
                await call.done_writing()
            await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()


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
        #: The draft that the target asks.
        self._draft: DirectDraftSession | None = None
        #: The drafts that it asks through this stream, by the epochs of their sessions.
        self._relayed: dict[int, RelayedDraft] = {}
        self.opened = opened

    def offer(self, proposal: Proposal, multi_step_tokens: int = 0) -> None:
        """Ask for a round."""
        message = pb.Round(
            epoch=self._epoch,
            committed_len=proposal.base_len,
            proposal=codec.encode_proposal(proposal),
            multi_step_tokens=multi_step_tokens,
        )
        self._stream.post(pb.VerifyRequest(round=message))

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Ask for up to ``num_tokens`` tokens without proposals."""
        message = pb.MultiStepDecode(epoch=self._epoch, committed_len=committed_len, num_tokens=num_tokens)
        self._stream.post(pb.VerifyRequest(multi_step_decode=message))

    async def open_draft(
        self, address: str, spec: SessionSpec, timeout_s: float, relay: DraftRelay | None = None
    ) -> DirectDraftSession:
        """See :class:`specdec.backends.DraftOpener`."""
        if relay is not None:
            self._relayed[spec.epoch] = relay.open_relayed(partial(self._pass_answer, spec.epoch))
        self._draft = draft = DirectDraftSession(spec.epoch, self._post_length)
        message = pb.OpenDraft(
            epoch=self._epoch,
            address=address,
            session=codec.encode_open_draft(replace(spec, token_ids=())).open,
            timeout_ms=round(1e3 * timeout_s),
            trace_headers=dict(spec.trace_headers),
        )
        self._stream.post(pb.VerifyRequest(open_draft=message))
        await draft.wait_opened()
        return draft

    def _post_length(self, num_draft_tokens: int) -> None:
        message = pb.DraftLength(epoch=self._epoch, num_draft_tokens=num_draft_tokens)
        self._stream.post(pb.VerifyRequest(draft_length=message))

    def _pass_answer(self, epoch: int, answer: draft_pb.RelayedResponse) -> None:
        answer.session = epoch
        self._stream.post(pb.VerifyRequest(relayed=answer))

    def _pass_question(self, message: draft_pb.RelayedRequest) -> None:
        if (draft := self._relayed.get(message.session)) is None:
            return
        if message.HasField("request"):
            draft.post(message.request)
        else:
            self._relayed.pop(message.session).close()

    async def receive(self) -> Verdict:
        """The next verdict; those of another epoch are stale and dropped."""
        while True:
            answer = await self._stream.receive()
            kind = answer.WhichOneof("kind")
            if self._draft is not None and kind == "draft_opened":
                self._draft.open(codec.decode_draft_opened(answer.draft_opened))
            elif self._draft is not None and kind == "draft_lost":
                lost = answer.draft_lost
                self._draft.lose(lost.epoch, rebuild_error(lost.code, lost.text, {}))
            elif kind == "relayed":
                self._pass_question(answer.relayed)
            elif kind == "hidden_states":
                self._states.add(codec.decode_verdict_states(answer.hidden_states))
            elif kind == "verdict" and answer.verdict.epoch == self._epoch:
                verdict = codec.decode_verdict(answer.verdict)
                for relayed in self._relayed.values():
                    relayed.note(verdict)
                if earlier := self._states.take():
                    verdict = replace(verdict, hidden_states=(*earlier, *verdict.hidden_states))
                return verdict

    async def close(self) -> None:
        """Release the cache. Idempotent."""
        while self._relayed:
            self._relayed.popitem()[1].close()
        if self._draft is not None:
            self._draft.end()
        await self._stream.close()
