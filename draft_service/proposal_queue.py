"""The proposals of a session that wait to be sent."""

from __future__ import annotations

import asyncio
from collections import deque

from specdec.errors import Cancelled
from specdec.types import Proposal


class ProposalQueue:
    """Proposals and errors in order, for one reader."""

    def __init__(self) -> None:
        self._waiting: deque[Proposal | BaseException] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, item: Proposal | BaseException) -> None:
        """Add one; dropped after :meth:`close`."""
        if not self._closed:
            self._waiting.append(item)
            self._wake()

    def clear(self) -> None:
        """Drop the proposals that wait; errors stay."""
        self._waiting = deque(item for item in self._waiting if not isinstance(item, Proposal))

    def close(self) -> None:
        """Drop what waits; :meth:`take` raises from now on."""
        self._closed = True
        self._waiting.clear()
        self._wake()

    async def take(self) -> Proposal:
        """The next proposal; an error that comes before it is raised, :class:`Cancelled` once it is closed."""
        while not self._waiting:
            if self._closed:
                raise Cancelled("the session was closed")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._waiting.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def drain(self) -> list[Proposal]:
        """All proposals that wait, up to an error; does not wait."""
        proposals = []
        while self._waiting and isinstance(item := self._waiting[0], Proposal):
            proposals.append(item)
            self._waiting.popleft()
        return proposals

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
