"""The gRPC skin of the target: message in, call, message out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from specdec import codec
from specdec.errors import InvalidRequest, StaleSession, Unavailable
from specdec.sessions import Verdict
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import target_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb
from target_service.core import TargetCore
from target_service.session import Session

Context = grpc.aio.ServicerContext[Any, Any]


class TargetServicer(pb_grpc.TargetServiceServicer):
    """Serves a :class:`TargetCore`; UNAVAILABLE while there is none yet."""

    def __init__(self, core: TargetCore | None = None) -> None:
        self.core = core

    async def Verify(  # type: ignore[override]  # written with context.write, which the stubs do not know
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: Context
    ) -> None:
        """One session. However the stream ends, its cache is released on the way out."""
        core = self._require_core()
        request = await context.read()
        if request is grpc.aio.EOF:
            return
        if request.WhichOneof("kind") != "open":
            raise InvalidRequest("the first message of a stream must be open", param="open")
        spec = codec.decode_open_target(request.open)
        session = await core.open(spec)
        try:
            await context.write(pb.VerifyResponse(opened=codec.encode_target_opened(session.opened)))
            await _write(context, session.first)
            if spec.decode_ahead_tokens and session.first.finish_reason is None:
                await _write_ahead(context, session, session.first.committed_len, spec.decode_ahead_tokens)
            while (request := await context.read()) is not grpc.aio.EOF:
                await self._answer(core, session, request, context)
        finally:
            await session.close()

    async def GetModelInfo(
        self, request: types_pb.GetModelInfoRequest, context: Context
    ) -> types_pb.GetModelInfoResponse:
        """Describe the model and the load."""
        core = self._require_core()
        return types_pb.GetModelInfoResponse(
            model=codec.encode_model_info(await core.info()), load=codec.encode_load(await core.load())
        )

    async def _answer(self, core: TargetCore, session: Session, request: pb.VerifyRequest, context: Context) -> None:
        """Answer one message; a stale one is counted and dropped."""
        kind = request.WhichOneof("kind")
        if kind is None or kind == "open":
            raise InvalidRequest("only the first message of a stream is open; then send round or decode_ahead")
        message = request.round if kind == "round" else request.decode_ahead
        if message.epoch != session.opened.epoch:
            core.count_stale()
            return
        try:
            if kind == "round":
                proposal = codec.decode_proposal(request.round.proposal) if request.round.HasField("proposal") else None
                await _write(context, await session.verify(message.committed_len, proposal))
            else:
                await _write_ahead(context, session, message.committed_len, request.decode_ahead.num_tokens)
        except StaleSession:
            return  # counted where it was raised

    def _require_core(self) -> TargetCore:
        if self.core is None:
            raise Unavailable("the target is still loading its model")
        return self.core


async def _write(context: Context, verdict: Verdict) -> None:
    await context.write(pb.VerifyResponse(verdict=codec.encode_verdict(verdict)))


async def _write_ahead(context: Context, session: Session, committed_len: int, num_tokens: int) -> None:
    async with aclosing(session.decode_ahead(committed_len, num_tokens)) as verdicts:
        async for verdict in verdicts:
            await _write(context, verdict)
