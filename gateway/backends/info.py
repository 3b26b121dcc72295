"""What every model server tells about itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import codec
from specdec.errors import Unavailable
from specdec.rpc.session_stream import call_unary
from specdec.types import ModelInfo, ServerLoad
from specdec.v1 import types_pb2 as pb

#: Seconds a server may take to describe itself.
INFO_TIMEOUT_S: Final = 10.0


class ServerInfo:
    """The part both backends share. ``method`` is the stub's GetModelInfo."""

    def __init__(self, channel: grpc.aio.Channel, method: Callable[..., Any]) -> None:
        self._channel = channel
        self._get_model_info = method

    async def health(self) -> AsyncGenerator[bool, None]:
        """Whether it serves: now, and whenever that changes. Waits for a server that cannot be reached.

        Raises:
            Unavailable: the connection was lost.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in call:
                yield answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            raise Unavailable(error.details() or "the connection was lost") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def info(self) -> ModelInfo:
        """Describe the model."""
        return codec.decode_model_info((await self._ask()).model)

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        return codec.decode_load((await self._ask()).load)

    async def _ask(self) -> pb.GetModelInfoResponse:
        answer: pb.GetModelInfoResponse = await call_unary(
            self._get_model_info, pb.GetModelInfoRequest(), timeout_s=INFO_TIMEOUT_S
        )
        return answer
