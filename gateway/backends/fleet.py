"""The replicas that can be found: their channels, a watch on the health of each, and how full they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.backends.discovery import Discovery, Endpoint
from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from gateway.routing import Pool, Replica, Router
from specdec.errors import TandemError
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import open_channel
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: Seconds between tries to reach a replica that is down.
RETRY_S: Final = 0.2
#: Seconds between two checks of the certificates' files, of addresses that may change and of the targets' load.
CHECK_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Role:
    """Targets or drafts."""

    discovery: Discovery
    pool: Pool[Any]
    connect: Callable[[grpc.aio.Channel], Any]
    up: Callable[[Replica[Any], ModelInfo], None]


class _Member:
    """A replica that is watched."""

    def __init__(self, role: _Role, endpoint: Endpoint, channel: grpc.aio.Channel) -> None:
        self.role = role
        self.endpoint = endpoint
        self.channel = channel
        self.replica = Replica[Any](endpoint.address, role.connect(channel), healthy=False)
        self.watch: asyncio.Task[None] | None = None


class Fleet:
    """Keeps a router's replicas up to date. A replica is used once its health says SERVING and it described itself."""

    def __init__(
        self, targets: Sequence[str], drafts: Sequence[str] = (), *, certificates: Certificates | None = None
    ) -> None:
        """``targets``, ``drafts``: addresses as :func:`~gateway.backends.discovery.source_of` reads them.

        Raises:
            InvalidRequest: an address is none.
        """
        self._certificates = certificates
        self.router = Router()
        self._roles = (
            _Role(Discovery(targets), self.router.targets, GrpcTarget, self.router.target_up),
            _Role(Discovery(drafts), self.router.drafts, GrpcDraft, self.router.draft_up),
        )
        self._members: list[_Member] = []
        for role in self._roles:
            self._join(role)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch; returns at once."""
        self._watch_all()
        self._tasks.append(asyncio.create_task(_repeat(self._check_loads)))
        if self._certificates is not None or not all(role.discovery.is_fixed for role in self._roles):
            self._tasks.append(asyncio.create_task(_repeat(self._check_members)))

    async def stop(self) -> None:
        """Stop watching and close the channels."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._end_watches(self._members)
        for member in self._members:
            await member.channel.close()

    def _join(self, role: _Role) -> None:
        """Add the servers found that are no members yet."""
        known = {member.endpoint for member in self._members if member.role is role}
        for endpoint in role.discovery.endpoints:
            if endpoint not in known:
                member = _Member(role, endpoint, self._open_channel(endpoint))
                self._members.append(member)
                role.pool.replicas.append(member.replica)

    def _open_channel(self, endpoint: Endpoint) -> grpc.aio.Channel:
        return open_channel(endpoint.address, certificates=self._certificates, host_name=endpoint.host_name)

    def _watch_all(self) -> None:
        for member in self._members:
            if member.watch is None:
                member.watch = asyncio.create_task(self._watch(member))

    async def _end_watches(self, members: Sequence[_Member]) -> None:
        watches = [member.watch for member in members if member.watch is not None]
        for member in members:
            member.watch = None
        for watch in watches:
            watch.cancel()
        if watches:
            await asyncio.wait(watches)

    async def _check_members(self) -> None:
        """Let servers join and leave, and use new certificates; one after the other, for both begin and end watches."""
        await self._update_members()
        if self._certificates is not None and self._certificates.renew():
            await self._reconnect()

    async def _update_members(self) -> None:
        """A server that leaves gets no new sessions. Those that are open on it stay, and hold its channel."""
        await asyncio.gather(*(role.discovery.update() for role in self._roles))
        listed = {role: set(role.discovery.endpoints) for role in self._roles}
        gone = [member for member in self._members if member.endpoint not in listed[member.role]]
        self._members = [member for member in self._members if member not in gone]
        await self._end_watches(gone)
        for member in gone:
            member.role.pool.replicas.remove(member.replica)
            self.router.down(member.replica, "it is not listed any more")
        for role in self._roles:
            self._join(role)
        self._watch_all()

    async def _reconnect(self) -> None:
        """Open new channels: a channel keeps its certificates for its later connections.

        Sessions that are open hold the old channel, which closes with the last of them.
        """
        await self._end_watches(self._members)
        for member in self._members:
            member.channel = self._open_channel(member.endpoint)
            member.replica.backend = member.role.connect(member.channel)
        self._watch_all()

    async def _check_loads(self) -> None:
        """Ask how full the replicas are."""
        await asyncio.gather(*(_update_load(replica) for role in self._roles for replica in role.pool.usable))

    async def _watch(self, member: _Member) -> None:
        stub, replica = health_pb2_grpc.HealthStub(member.channel), member.replica
        while True:
            try:
                await self._follow(stub, replica, member.role.up)
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


async def _repeat(check: Callable[[], Awaitable[None]]) -> None:
    """Check for ever; an error ends no later check."""
    while True:
        try:
            await check()
        except Exception:
            logger.exception("a check of the replicas failed")
        await asyncio.sleep(CHECK_INTERVAL_S)


async def _update_load(replica: Replica[Any]) -> None:
    with suppress(TandemError, TimeoutError):  # the watch on its health sees to a replica that does not answer
        async with asyncio.timeout(CHECK_INTERVAL_S):
            replica.note_load(await replica.backend.load())
