"""The replicas named by address: their channels, and a watch on the health of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from gateway.routing import Replica, Router
from specdec.backends import DraftBackend, TargetBackend
from specdec.errors import TandemError
from specdec.rpc.channel import open_channel
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: Seconds between tries to reach a replica that is down.
RETRY_S: Final = 0.2


class Fleet:
    """Keeps a router's replicas up to date. A replica is used once its health says SERVING and it described itself."""

    def __init__(self, targets: Sequence[str], drafts: Sequence[str] = ()) -> None:
        self._channels = {address: open_channel(address) for address in (*targets, *drafts)}
        self.router = Router(
            [Replica[TargetBackend](name, GrpcTarget(self._channels[name]), healthy=False) for name in targets],
            [Replica[DraftBackend](name, GrpcDraft(self._channels[name]), healthy=False) for name in drafts],
        )
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch; returns at once."""
        for target in self.router.targets.replicas:
            self._watches.append(asyncio.create_task(self._watch(target, self.router.target_up)))
        for draft in self.router.drafts.replicas:
            self._watches.append(asyncio.create_task(self._watch(draft, self.router.draft_up)))

    async def stop(self) -> None:
        """Stop watching and close the channels."""
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)
        for channel in self._channels.values():
            await channel.close()

    async def _watch(self, replica: Replica[Any], up: Callable[[Replica[Any], ModelInfo], None]) -> None:
        stub = health_pb2_grpc.HealthStub(self._channels[replica.name])
        while True:
            try:
                await self._follow(stub, replica, up)
            except (grpc.aio.AioRpcError, TandemError) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                self.router.down(replica, text or "the connection was lost")
            except Exception:
                logger.exception("watching %s failed", replica.name)
                self.router.down(replica, "an unexpected error")
            else:
                self.router.down(replica, "it ended the health watch")
            await asyncio.sleep(RETRY_S)

    async def _follow(
        self, stub: health_pb2_grpc.HealthStub, replica: Replica[Any], up: Callable[[Replica[Any], ModelInfo], None]
    ) -> None:
        call = stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        try:
            async for answer in call:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    up(replica, await replica.backend.info())
                else:
                    self.router.down(replica, "it is not serving")
        finally:
            call.cancel()
