"""The gRPC service: converts a message, calls the core, converts the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import grpc.aio

from draft_service.core import DraftCore, shutting_down
from draft_service.engine_stream import EngineStream
from draft_service.session import CoreSession
from specdec import codec
from specdec.errors import Cancelled, InvalidRequest
from specdec.hidden_state_buffer import StateBuffer
from specdec.process.lifecycle import finish
from specdec.rpc.call import Call
from specdec.rpc.call_span import current_span
from specdec.rpc.core_service import Context, CoreServicer
from specdec.types import Proposal
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc
from specdec.v1.types_pb2 import StateMapPart


class DraftServicer(CoreServicer[DraftCore], pb_grpc.DraftServiceServicer):
    """Serves a :class:`DraftCore`."""

    noun = "draft service"

    async def Draft(  # type: ignore[override]  # written with context.write, which the stubs do not know
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Context
    ) -> None:
        """Serve one session. However the stream ends, the session's memory is released."""
        core = self.require_core()
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("kind") != "open":
            raise InvalidRequest("the first message of a stream must be open", param="open")
        if (span := current_span()) is not None:
            span.phase("prefill", start_ns=span.start_ns)
        session = await core.open(codec.decode_open_draft(first.open))
        if span is not None:
            span.phase("draft")
            span.set({"tandem.k": session.opened.num_speculative_tokens, "tandem.epoch": session.opened.epoch})
        reading = asyncio.create_task(_read(core, session, context), name="draft-stream")
        reading.add_done_callback(lambda _: session.end())
        try:
            await context.write(pb.DraftResponse(opened=codec.encode_draft_opened(session.opened)))
            while True:
                await context.write(_response([await session.receive(), *session.received_more()]))
        except Cancelled:
            if not reading.done():
                raise
            await reading  # raises what ended the session, unless the client closed the stream
        finally:
            reading.cancel()
            await finish(session.close())
            with suppress(asyncio.CancelledError, Exception):  # the stream is over, whatever ended it
                await reading

    async def DraftSteps(  # type: ignore[override]  # as above
        self, request_iterator: AsyncIterator[pb.DraftStepRequest], context: Context
    ) -> None:
        """Serve the sessions of an engine, step by step, until the service stops: the engine opens them elsewhere at
        once then, where a stream of Tandem's own sessions may end in peace.
        """
        core = self.require_core()
        stream, end = EngineStream(core), partial(cast("Call", context).cancel, shutting_down())
        core.on_drain.add(end)
        reading = asyncio.ensure_future(context.read())
        try:
            while (request := await reading) is not grpc.aio.EOF:
                reading = asyncio.ensure_future(context.read())
                await context.write(await stream.step(request, superseded=reading))
        finally:
            core.on_drain.discard(end)
            reading.cancel()
            await finish(stream.close())

    async def GetStateMap(self, request: pb.GetStateMapRequest, context: Context) -> AsyncIterator[StateMapPart]:
        """The head's first layer."""
        async for part in self.require_core().state_map(request.fingerprint):
            yield part


async def _read(core: DraftCore, session: CoreSession, context: Context) -> None:
    """Pass a stream's messages to the session as they arrive; proposals are written by another task."""
    waiting = StateBuffer()
    while (request := await context.read()) is not grpc.aio.EOF:
        kind = request.WhichOneof("kind")
        if kind == "hidden_states":
            waiting.add(codec.decode_hidden_states(request.hidden_states))
            continue
        if kind != "advance":
            raise InvalidRequest("only the first message of a stream may be open", param="open")
        advance = request.advance
        if advance.epoch == session.opened.epoch:
            token_ids = tuple(advance.token_ids)
            for states in advance.hidden_states:
                waiting.add(codec.decode_hidden_states(states))
            states, stream_tokens = waiting.take(), advance.stream_tokens
            await session.advance(advance.base_len, token_ids, advance.num_draft_tokens, states, stream_tokens)
            await asyncio.sleep(0)  # drafting comes before the next read
        else:
            waiting.clear()
            core.count_stale()


def _response(proposals: Sequence[Proposal]) -> pb.DraftResponse:
    first, *others = map(codec.encode_proposal, proposals)
    return pb.DraftResponse(proposal=first, more_proposals=others)
