"""Slots for receiving messages: gRPC holds as much of each message in memory as has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

#: Seconds between two checks of the messages being received, and the checks after which one is late.
CHECK_INTERVAL_S: Final = 0.1
MAX_CHECKS: Final = 3


class ReceivingSlots:
    """Lets a number of calls receive a message at once; more wait.

    The newest goes next, and a late message ends where others wait: a crowd of calls that send half a message delays
    one that sends a whole one by tenths of a second.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._receiving: set[_Receiving] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._check: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, end: Callable[[], None]) -> AsyncIterator[None]:
        """Wait for a slot and hold it. ``end`` is called where the message is late and others wait."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait()
        receiving = _Receiving(end)
        self._receiving.add(receiving)
        try:
            yield
        finally:
            self._receiving.discard(receiving)
            self._pass_on()

    async def _wait(self) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        self._schedule_check()
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the slot came in the same iteration of the loop
                self._pass_on()
            elif mine in self._waiting:
                self._waiting.remove(mine)
            raise

    def _pass_on(self) -> None:
        """Give the slot to the newest call that waits."""
        while self._waiting:
            newest = self._waiting.pop()
            if not newest.done():
                newest.set_result(None)
                return
        self._num_free += 1

    def _schedule_check(self) -> None:
        if self._check is None:
            self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._end_late)

    def _end_late(self) -> None:
        self._check = None
        for receiving in self._receiving:
            # Checks are counted, not seconds: a loop that was held up has not read what came meanwhile.
            receiving.num_checks += bool(self._waiting)
            if receiving.num_checks == MAX_CHECKS:
                receiving.end()
        if self._waiting:
            self._schedule_check()


class _Receiving:
    """A message being received."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        #: Checks that found it while others waited.
        self.num_checks = 0
