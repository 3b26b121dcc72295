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
from specdec.types import DraftOpening, Proposal, SessionSpec, TargetOpened, Verdict
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
            session = GrpcTargetSession(stream, spec)
            await session.start(spec)
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
    opened: TargetOpened

    def __init__(self, stream: MessageStream[pb.VerifyRequest, pb.VerifyResponse], spec: SessionSpec) -> None:
        self._stream = stream
        self._epoch = spec.epoch
        #: Hidden states that belong to the next verdict.
        self._states = StateBuffer()
        #: The draft that the target asks.
        self.draft = None if spec.draft is None else DirectDraftSession(spec.draft, self._post_length)
        #: The drafts that it asks through this stream, by the epochs of their sessions.
        self._relayed: dict[int, RelayedDraft] = {}

    async def start(self, spec: SessionSpec) -> None:
        """Open it, up to the first token."""
        answer = await self._stream.exchange(codec.encode_open_target(spec))
        while not answer.HasField("opened"):
            if not self._take(answer):
                raise Unavailable("the target answered an opening with something else")
            answer = await self._stream.receive()
        self.opened = codec.decode_target_opened(answer.opened)
        if not self.opened.opens_draft:
            self.draft = None
        self.first = await self.receive()

    def offer(self, proposal: Proposal) -> None:
        """Ask for a round."""
        proposed = codec.encode_proposal(proposal)
        message = pb.Round(epoch=self._epoch, committed_len=proposal.base_len, proposal=proposed)
        self._stream.post(pb.VerifyRequest(round=message))

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Ask for up to ``num_tokens`` tokens without proposals."""
        message = pb.MultiStepDecode(epoch=self._epoch, committed_len=committed_len, num_tokens=num_tokens)
        self._stream.post(pb.VerifyRequest(multi_step_decode=message))

    async def open_draft(self, opening: DraftOpening, relay: DraftRelay | None = None) -> DirectDraftSession:
        """See :class:`specdec.backends.DraftOpener`."""
        if relay is not None:
            epoch = opening.spec.epoch
            self._relayed[epoch] = relay.open_relayed(partial(self._pass_answer, epoch))
        self.draft = draft = DirectDraftSession(opening, self._post_length)
        self._stream.post(pb.VerifyRequest(open_draft=codec.encode_draft_opening(self._epoch, opening)))
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
            if not answer.HasField("verdict"):
                self._take(answer)
                continue
            if answer.verdict.epoch != self._epoch:
                continue
            verdict = codec.decode_verdict(answer.verdict)
            for relayed in self._relayed.values():
                relayed.note(verdict)
            if earlier := self._states.take():
                verdict = replace(verdict, hidden_states=(*earlier, *verdict.hidden_states))
            return verdict

    def _take(self, answer: pb.VerifyResponse) -> bool:
        """Take what comes between verdicts; False: it is something else."""
        kind, draft = answer.WhichOneof("kind"), self.draft
        if draft is not None and kind == "draft_opened":
            draft.open(codec.decode_draft_opened(answer.draft_opened))
        elif draft is not None and kind == "draft_lost":
            draft.lose(answer.draft_lost.epoch, rebuild_error(answer.draft_lost.code, answer.draft_lost.text, {}))
        elif kind == "relayed":
            self._pass_question(answer.relayed)
        elif kind == "hidden_states":
            self._states.add(codec.decode_verdict_states(answer.hidden_states))
        else:
            return False
        return True

    async def close(self) -> None:
        """Release the cache. Idempotent."""
        while self._relayed:
            self._relayed.popitem()[1].close()
        if self.draft is not None:
            self.draft.end()
        await self._stream.close()
