"""The replicas named by address: their channels, and a watch on the health of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from gateway.routing import Replica, Router
from specdec.backends import DraftBackend, TargetBackend
from specdec.errors import TandemError
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import open_channel
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: Seconds between tries to reach a replica that is down.
RETRY_S: Final = 0.2
#: Seconds between two checks of the files of the certificates.
CHECK_INTERVAL_S: Final = 1.0


class Fleet:
    """Keeps a router's replicas up to date. A replica is used once its health says SERVING and it described itself."""

    def __init__(
        self, targets: Sequence[str], drafts: Sequence[str] = (), *, certificates: Certificates | None = None
    ) -> None:
        self._certificates = certificates
        self._channels = self._open_channels((*targets, *drafts))
        self.router = Router(
            [Replica[TargetBackend](name, GrpcTarget(self._channels[name]), healthy=False) for name in targets],
            [Replica[DraftBackend](name, GrpcDraft(self._channels[name]), healthy=False) for name in drafts],
        )
        self._watches: list[asyncio.Task[None]] = []
        self._renewal: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch; returns at once."""
        self._watch_all()
        if self._certificates is not None:
            self._renewal = asyncio.create_task(self._follow_certificates(self._certificates))

    async def stop(self) -> None:
        """Stop watching and close the channels."""
        tasks = [*self._watches, *([self._renewal] if self._renewal is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for channel in self._channels.values():
            await channel.close()

    def _open_channels(self, addresses: Iterable[str]) -> dict[str, grpc.aio.Channel]:
        return {address: open_channel(address, certificates=self._certificates) for address in addresses}

    def _watch_all(self) -> None:
        for target in self.router.targets.replicas:
            self._watches.append(asyncio.create_task(self._watch(target, self.router.target_up)))
        for draft in self.router.drafts.replicas:
            self._watches.append(asyncio.create_task(self._watch(draft, self.router.draft_up)))

    async def _follow_certificates(self, certificates: Certificates) -> None:
        """Open new channels when the files change: a channel keeps its certificates for its later connections.

        Sessions that are open hold the old channel, which closes with the last of them.
        """
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if not certificates.renew():
                continue
            for watch in self._watches:
                watch.cancel()
            await asyncio.wait(self._watches)
            self._watches.clear()
            self._channels = self._open_channels(self._channels)
            for target in self.router.targets.replicas:
                target.backend = GrpcTarget(self._channels[target.name])
            for draft in self.router.drafts.replicas:
                draft.backend = GrpcDraft(self._channels[draft.name])
            self._watch_all()

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
