"""A draft service that is reached over a network or a socket."""

from __future__ import annotations

import grpc.aio

from gateway.backends.info import ModelServer
from specdec import codec
from specdec.rpc.draft_stream import DRAFT_SERVICE, DraftStream
from specdec.types import SessionSpec
from specdec.v1 import draft_service_pb2 as pb


class GrpcDraft(ModelServer):
    """Opens sessions on one draft replica."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        """``address`` is where the channel leads."""
        super().__init__(channel, DRAFT_SERVICE, address)

    async def open(self, spec: SessionSpec) -> DraftStream:
        """Admit and prefill. Cancelling leaves nothing behind."""
        stream = await self._stream("Draft", pb.DraftRequest, pb.DraftResponse, spec.trace_headers)
        return await DraftStream.open(stream, codec.encode_open_draft(spec))
