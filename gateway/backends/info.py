"""What the gateway asks of every model server: its health, its description, and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import codec
from specdec.errors import Unavailable
from specdec.rpc.framed.address import framed_path
from specdec.rpc.framed.stream import FramedStream
from specdec.rpc.session_stream import MessageStream, SessionStream, call_unary
from specdec.types import ModelInfo, ServerLoad
from specdec.v1 import types_pb2 as pb

Q = TypeVar("Q", bound=Message)  # request message
R = TypeVar("R", bound=Message)  # response message

#: Seconds a server may take to describe itself.
INFO_TIMEOUT_S: Final = 10.0


class ModelServer:
    """The part both backends share."""

    def __init__(self, channel: grpc.aio.Channel, service: str, address: str = "") -> None:
        """``service`` is the full name of the gRPC service, ``address`` where the channel leads."""
        self._channel = channel
        self._service = service
        self._framed_path = framed_path(address)
        self._framed: WeakSet[FramedStream[Any, Any]] = WeakSet()
        self._get_model_info: Callable[..., Any] = channel.unary_unary(
            f"/{service}/GetModelInfo",
            request_serializer=pb.GetModelInfoRequest.SerializeToString,
            response_deserializer=pb.GetModelInfoResponse.FromString,
        )

    async def health(self) -> AsyncGenerator[bool, None]:
        """Whether it serves: now, and whenever that changes. Waits for a server that cannot be reached.

        Framed streams end with a lost connection: nothing else tells of a server that stopped without closing them.

        Raises:
            Unavailable: the connection was lost.
        """
        stub = health_pb2_grpc.HealthStub(self._channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in call:
                yield answer.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            lost = Unavailable(error.details() or "the connection was lost")
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                for stream in tuple(self._framed):
                    stream.give_up(lost)
            raise lost from error
        finally:
            call.cancel()

    async def _stream(
        self, name: str, request: type[Q], response: type[R], metadata: Sequence[tuple[str, str]]
    ) -> MessageStream[Q, R]:
        """Begin a call of the streaming method ``name``: framed where the server listens so, else over gRPC."""
        method = f"/{self._service}/{name}"
        if self._framed_path is not None:
            with suppress(FileNotFoundError, ConnectionRefusedError):  # the name may be left of a killed server
                stream: FramedStream[Q, R] = await FramedStream.open(
                    self._framed_path, method, response.FromString, metadata
                )
                self._framed.add(stream)
                return stream
        call = self._channel.stream_stream(
            method, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )
        return SessionStream(partial(call, metadata=metadata or None))

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
