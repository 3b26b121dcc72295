"""The replicas that can be found: connections, a watch on the health of each, and how full they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from gateway.backends.discovery import Discovery, Endpoint
from gateway.backends.draft import GrpcDraft
from gateway.backends.engines.answer import BadAnswer
from gateway.backends.engines.spec import EngineSpec
from gateway.backends.engines.target import EngineTarget
from gateway.backends.target import GrpcTarget
from gateway.placement.routing import Pool, Replica, Router
from specdec.errors import InvalidRequest, ModelNotSupported, Overloaded, TandemError
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import open_channel
from specdec.settings.engines import is_engine
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: Seconds between tries to reach a replica that is down.
RETRY_S: Final = 0.2
#: The same for one that answered and cannot be used as it is.
REFUSED_RETRY_S: Final = 5.0
#: Seconds between two checks of the certificates' files, of addresses that may change and of the targets' load.
CHECK_INTERVAL_S: Final = 1.0
#: What a replica says that answered. Others are lost connections.
_REFUSALS: Final = (ModelNotSupported, InvalidRequest, Overloaded, BadAnswer)


@dataclass(frozen=True, slots=True, eq=False)
class _Role:
    """Targets or drafts."""

    #: What its certificates are for.
    name: str
    discovery: Discovery
    pool: Pool[Any]
    connect: Callable[[grpc.aio.Channel, str], Any]
    up: Callable[[Replica[Any], ModelInfo], None]


class _Member:
    """A replica that is watched."""

    def __init__(self, role: _Role, endpoint: Endpoint, backend: Any) -> None:
        self.role = role
        self.endpoint = endpoint
        self.replica = Replica[Any](endpoint.address, backend, healthy=False)
        self.watch: asyncio.Task[None] | None = None
        #: Why it cannot be used, as the log has it.
        self.problem = ""


class Fleet:
    """Keeps a router's replicas up to date. A replica is used once its health says SERVING and it described itself."""

    def __init__(
        self,
        targets: Sequence[str],
        drafts: Sequence[str] = (),
        *,
        certificates: Certificates | None = None,
        engines: EngineSpec | None = None,
    ) -> None:
        """``targets``, ``drafts``: addresses as :func:`~gateway.backends.discovery.source_of` reads them;
        ``engines``: what to know of targets that are engines.

        Raises:
            InvalidRequest: an address is none.
        """
        self._certificates = certificates
        self._engines = engines
        self.router = Router()
        self._roles = (
            _Role("target", Discovery(targets), self.router.targets, GrpcTarget, self.router.target_up),
            _Role("draft", Discovery(drafts), self.router.drafts, GrpcDraft, self.router.draft_up),
        )
        self._members: list[_Member] = []
        for role in self._roles:
            self._join(role)
        self._tasks: list[asyncio.Task[None]] = []
        #: Whether there are certificates that connections do not use yet.
        self._is_outdated = False

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
            await member.replica.backend.close()

    def _join(self, role: _Role) -> None:
        """Add the servers found that are no members yet."""
        known = {member.endpoint for member in self._members if member.role is role}
        for endpoint in role.discovery.endpoints:
            if endpoint not in known:
                member = _Member(role, endpoint, self._connect(role, endpoint))
                self._members.append(member)
                role.pool.replicas.append(member.replica)

    def _connect(self, role: _Role, endpoint: Endpoint) -> Any:
        if is_engine(endpoint.address):
            assert self._engines is not None, "an engine is given without what to know of it"
            return EngineTarget(endpoint.address, self._engines)
        channel = open_channel(
            endpoint.address, certificates=self._certificates, host_name=endpoint.host_name, role=role.name
        )
        return role.connect(channel, endpoint.address)

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
            self._is_outdated = True
        if self._is_outdated:  # also where the last try failed
            await self._reconnect()
            self._is_outdated = False

    async def _update_members(self) -> None:
        """A server that leaves gets no new sessions. Those that are open on it stay, and hold its connections."""
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
        for member in gone:  # a channel closes when nothing refers to it any more
            if isinstance(member.replica.backend, EngineTarget):
                await member.replica.backend.retire()

    async def _reconnect(self) -> None:
        """Open new channels: a channel keeps its certificates for its later connections, and so does an engine.

        Sessions that are open hold the old channel, which closes with the last of them.

        Raises:
            InvalidRequest: an engine cannot use the files.
        """
        engines = [each for each in self._members if isinstance(each.replica.backend, EngineTarget)]
        for member in engines:
            await member.replica.backend.reconnect()
        others = [each for each in self._members if each not in engines]
        await self._end_watches(others)
        for member in others:
            member.replica.backend = self._connect(member.role, member.endpoint)
        self._watch_all()

    async def _check_loads(self) -> None:
        """Ask how full the replicas are."""
        await asyncio.gather(*(_update_load(replica) for role in self._roles for replica in role.pool.usable))

    async def _watch(self, member: _Member) -> None:
        replica = member.replica
        while True:
            pause_s = RETRY_S
            try:
                await self._follow(member)
            except TandemError as error:
                self._note_down(member, str(error))
                if isinstance(error, _REFUSALS):
                    pause_s = REFUSED_RETRY_S
            except Exception:
                logger.exception("watching %s failed", replica.name)
                self.router.down(replica, "an unexpected error")
            else:
                self.router.down(replica, "it ended the health watch")
            await asyncio.sleep(pause_s)

    async def _follow(self, member: _Member) -> None:
        backend = member.replica.backend
        async with aclosing(backend.health()) as states:
            async for is_serving in states:
                if is_serving:
                    member.role.up(member.replica, await backend.info())
                    member.problem = ""
                else:
                    self.router.down(member.replica, "it is not serving")

    def _note_down(self, member: _Member, why: str) -> None:
        """The log has each reason once."""
        if not member.replica.healthy and member.problem != why:
            logger.warning("%s cannot be used: %s", member.replica.name, why)
        member.problem = why
        self.router.down(member.replica, why)


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
