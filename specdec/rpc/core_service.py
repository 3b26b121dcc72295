"""What the draft service and the target service have in common: a core that loads while the server runs already."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio

from specdec import codec
from specdec.errors import InternalError, Unavailable
from specdec.rpc.server import RpcServer
from specdec.types import ModelInfo, ServerLoad
from specdec.v1 import types_pb2

Context = grpc.aio.ServicerContext[Any, Any]


class Core(Protocol):
    """What a service serves."""

    #: Set once nothing can be computed any more, and why that is. All sessions have ended then.
    failed: asyncio.Event
    failure: InternalError | None

    async def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        ...

    def drain(self) -> None:
        """Open no new sessions."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


C = TypeVar("C", bound=Core)


class CoreServicer(Generic[C]):
    """The part of a servicer that knows its core; UNAVAILABLE while there is none yet."""

    #: What is still loading then.
    noun: str

    def __init__(self, core: C | None = None) -> None:
        self.core = core

    async def GetModelInfo(
        self, request: types_pb2.GetModelInfoRequest, context: Context
    ) -> types_pb2.GetModelInfoResponse:
        """Describe the model and the load."""
        core = self.require_core()
        return types_pb2.GetModelInfoResponse(
            model=codec.encode_model_info(await core.info()), load=codec.encode_load(await core.load())
        )

    async def close(self) -> None:
        """Release what calls have in common. No call runs."""

    def require_core(self) -> C:
        """The core; raises :class:`Unavailable` while there is none."""
        if self.core is None:
            raise Unavailable(f"the {self.noun} is still loading its model")
        return self.core


class CoreService(Generic[C]):
    """A :class:`specdec.rpc.lifecycle.Service` of one core."""

    def __init__(
        self,
        name: str,
        servicer: CoreServicer[C],
        add_to_server: Callable[[Any, Any], None],
        full_name: str,
        start: Callable[[], Awaitable[C]],
    ) -> None:
        """``add_to_server`` is generated; ``full_name`` is that of the gRPC service; ``start`` loads the core."""
        self.name = name
        self._servicer = servicer
        self._add_to_server = add_to_server
        self._full_name = full_name
        self._start = start

    @property
    def core(self) -> C | None:
        """The core; None before :meth:`start`."""
        return self._servicer.core

    def register(self, server: RpcServer) -> None:
        """Add the servicer."""
        server.add(self._add_to_server, self._servicer, self._full_name)

    async def start(self) -> None:
        """Load and warm up the model."""
        self._servicer.core = await self._start()

    async def wait_failed(self) -> InternalError:
        """Return once the core can compute nothing any more."""
        core = self._servicer.require_core()
        await core.failed.wait()
        assert core.failure is not None
        return core.failure

    async def drain(self) -> None:
        """Open no new sessions."""
        if self.core is not None:
            self.core.drain()

    async def stop(self) -> None:
        """Release everything."""
        await self._servicer.close()
        if self.core is not None:
            await self.core.close()
