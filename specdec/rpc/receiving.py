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

    The newest goes next. Late messages end where others wait, the oldest first and at most one for each that waits: a
    crowd of calls that send half a message delays one that sends a whole one by tenths of a second.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        #: Oldest first.
        self._receiving: dict[_Receiving, None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._check: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, end: Callable[[], None]) -> AsyncIterator[None]:
        """Wait for a slot and hold it. ``end`` is called, perhaps twice, where the message is late and others wait."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait()
        receiving = _Receiving(end)
        self._receiving[receiving] = None
        try:
            yield
        finally:
            del self._receiving[receiving]
            self._pass_on()

    @property
    def _num_waiting(self) -> int:
        return sum(not each.done() for each in self._waiting)

    async def _wait(self) -> None:
        mine = asyncio.get_running_loop().create_future()
        if all(each.done() for each in self._waiting):
            self._begin_checks()
        self._waiting.append(mine)
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

    def _begin_checks(self) -> None:
        for receiving in self._receiving:
            receiving.num_checks = 0
        if self._check is not None:
            self._check.cancel()
        self._schedule_check()

    def _schedule_check(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._end_late)

    def _end_late(self) -> None:
        self._check = None
        num_to_end = self._num_waiting
        if not num_to_end:
            return
        for receiving in self._receiving:
            # Checks are counted, not seconds: a loop that was held up has not read what came meanwhile.
            receiving.num_checks += 1
            if receiving.num_checks >= MAX_CHECKS and num_to_end:
                num_to_end -= 1
                receiving.end()
        self._schedule_check()


class _Receiving:
    """A message being received."""

    def __init__(self, end: Callable[[], None]) -> None:
        #: Ends the call. Idempotent: a call that is being ended frees its slot for one of those that wait.
        self.end = end
        #: Checks since the first of the calls that wait now began to.
        self.num_checks = 0
