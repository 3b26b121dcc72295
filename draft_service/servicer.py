"""The gRPC skin of the draft service: message in, call, message out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from draft_service.core import DraftCore
from specdec import codec
from specdec.errors import Cancelled, InvalidRequest, Unavailable
from specdec.sessions import DraftSession
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import draft_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Serves a :class:`DraftCore`; UNAVAILABLE while there is none yet."""

    def __init__(self, core: DraftCore | None = None) -> None:
        self.core = core

    async def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Context
    ) -> AsyncIterator[pb.DraftResponse]:
        """One session. However the stream ends, leaving this generator releases what the session holds."""
        core = self._require_core()
        first = await anext(request_iterator, None)
        if first is None:
            return
        if first.WhichOneof("kind") != "open":
            raise InvalidRequest("the first message of a stream must be open", param="open")
        session = await core.open(codec.decode_open_draft(first.open))
        closing: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(_read(core, session, request_iterator), name="draft-stream")
        reading.add_done_callback(lambda _: closing.set_result(asyncio.create_task(session.close())))
        try:
            yield pb.DraftResponse(opened=codec.encode_draft_opened(session.opened))
            while True:
                proposal = codec.encode_proposal(await session.receive())
                more = [codec.encode_proposal(other) for other in session.received_more()]
                yield pb.DraftResponse(proposal=proposal, more_proposals=more)
        except Cancelled:
            if not reading.done():
                raise
            await reading  # what ended the session: an error of its own, or just the end of the requests
        finally:
            reading.cancel()
            await (await closing)
            with suppress(asyncio.CancelledError, Exception):  # the stream is over, whatever ended it
                await reading

    async def GetModelInfo(
        self, request: types_pb.GetModelInfoRequest, context: Context
    ) -> types_pb.GetModelInfoResponse:
        """Describe the drafter and the load."""
        core = self._require_core()
        return types_pb.GetModelInfoResponse(
            model=codec.encode_model_info(await core.info()), load=codec.encode_load(await core.load())
        )

    def _require_core(self) -> DraftCore:
        if self.core is None:
            raise Unavailable("the draft service is still loading its model")
        return self.core


async def _read(core: DraftCore, session: DraftSession, requests: AsyncIterator[pb.DraftRequest]) -> None:
    """Pass a stream's messages on as they come, so that the session sees all that wait."""
    async for request in requests:
        if request.WhichOneof("kind") != "advance":
            raise InvalidRequest("only the first message of a stream may be open", param="open")
        advance = request.advance
        if advance.epoch == session.opened.epoch:
            token_ids = tuple(advance.token_ids)
            await session.advance(advance.base_len, token_ids, advance.num_draft_tokens, advance.num_ahead)
            await asyncio.sleep(0)  # drafting, or what is drafted already, comes before the next read
        else:
            core.count_stale()
