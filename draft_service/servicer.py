"""The gRPC skin of the draft service: message in, call, message out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc.aio

from draft_service.core import CoreSession, DraftCore
from specdec import codec
from specdec.errors import InvalidRequest, Unavailable
from specdec.sessions import Proposal
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
        async with Inbox(request_iterator) as inbox:
            first = await inbox.take_one()
            if first is None:
                return
            if first.WhichOneof("kind") != "open":
                raise InvalidRequest("the first message of a stream must be open", param="open")
            session = await core.open(codec.decode_open_draft(first.open))
            try:
                yield pb.DraftResponse(opened=codec.encode_draft_opened(session.opened))
                while requests := await inbox.take_all():
                    for index, request in enumerate(requests):
                        overtaken = index < len(requests) - 1
                        proposal = await _advance(core, session, request, overtaken)
                        if proposal is not None:
                            yield pb.DraftResponse(proposal=codec.encode_proposal(proposal))
            finally:
                await session.close()

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


async def _advance(core: DraftCore, session: CoreSession, request: pb.DraftRequest, overtaken: bool) -> Proposal | None:
    """Answer one Advance; None where there is no answer. One that a later one overtook gets an empty proposal."""
    if request.WhichOneof("kind") != "advance":
        raise InvalidRequest("only the first message of a stream may be open", param="open")
    advance = request.advance
    if advance.epoch != session.opened.epoch:
        core.count_stale()
        return None
    token_ids = tuple(advance.token_ids)
    if advance.num_draft_tokens and not overtaken:
        return await session.propose(advance.base_len, token_ids, advance.num_draft_tokens)
    await session.advance(advance.base_len, token_ids)
    if advance.num_draft_tokens:
        return Proposal(session.opened.epoch, advance.base_len + len(token_ids), ())
    return None


class Inbox:
    """Reads a stream ahead, so that a draft that fell behind sees all that waits and works on the newest only."""

    def __init__(self, requests: AsyncIterator[pb.DraftRequest]) -> None:
        self._requests = requests
        self._received: list[pb.DraftRequest] = []
        self._ended = False
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._read(), name="draft-inbox")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # the stream is over, whatever ended it
            await self._task

    async def take_one(self) -> pb.DraftRequest | None:
        """The next message; None at the end of the stream."""
        await self._arrival()
        return self._received.pop(0) if self._received else None

    async def take_all(self) -> list[pb.DraftRequest]:
        """All messages that wait, at least one; empty at the end of the stream."""
        await self._arrival()
        received, self._received = self._received, []
        return received

    async def _arrival(self) -> None:
        while not self._received and not self._ended:
            self._wake.clear()
            await self._wake.wait()

    async def _read(self) -> None:
        try:
            async for request in self._requests:
                self._received.append(request)
                self._wake.set()
        finally:
            self._ended = True
            self._wake.set()
