"""A draft service that is reached over a network or a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from gateway.backends.info import ModelServer
from specdec import codec
from specdec.rpc.draft_stream import DRAFT_SERVICE, DraftStream
from specdec.rpc.status import error_from_rpc
from specdec.types import SessionSpec
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1.types_pb2 import StateMapPart


class GrpcDraft(ModelServer):
    """Opens sessions on one draft replica."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        """``address`` is where the channel leads."""
        super().__init__(channel, DRAFT_SERVICE, address)
        self._get_state_map: Callable[[pb.GetStateMapRequest], Any] = channel.unary_stream(
            f"/{DRAFT_SERVICE}/GetStateMap",
            request_serializer=pb.GetStateMapRequest.SerializeToString,
            response_deserializer=StateMapPart.FromString,
        )

    async def open(self, spec: SessionSpec) -> DraftStream:
        """Admit and prefill. Cancelling leaves nothing behind."""
        stream = await self._stream("Draft", pb.DraftRequest, pb.DraftResponse, spec.trace_headers)
        return await DraftStream.open(stream, codec.encode_open_draft(spec))

    async def state_map(self, fingerprint: str) -> AsyncIterator[StateMapPart]:
        """See :class:`specdec.backends.StateMapSource`."""
        call = self._get_state_map(pb.GetStateMapRequest(fingerprint=fingerprint))
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()
