"""Which of the messages being received end for those that wait."""

import asyncio
import time
from contextlib import suppress

import pytest

from specdec.rpc.receiving import CHECK_INTERVAL_S, MAX_CHECKS, ReceivingSlots

pytestmark = pytest.mark.usefixtures("virtual_time")


class Calls:
    """Calls that never receive the rest of their messages."""

    def __init__(self, num_slots):
        self.slots = ReceivingSlots(num_slots)
        self.tasks = {}
        self.begun, self.ended = [], []

    async def open(self, *names):
        """Open calls and let each of them come as far as it gets."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._receive(name))
            await asyncio.sleep(0)

    async def _receive(self, name):
        async with self.slots.slot(lambda: self._end(name)):
            self.begun.append(name)
            await asyncio.Event().wait()

    def _end(self, name):
        self.ended.append(name)
        self.tasks[name].cancel()

    async def cancel(self, name):
        self.tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.tasks[name]

    async def close(self):
        for name in self.tasks:
            await self.cancel(name)


@pytest.fixture
async def calls(virtual_time):
    calls = Calls(3)
    await calls.open("a", "b", "c")
    yield calls
    await calls.close()


async def checks(number):
    """Let the time of so many checks pass; a half: no check is due when it returns."""
    await asyncio.sleep(number * CHECK_INTERVAL_S)


async def test_as_many_end_as_wait_the_oldest_first(calls):
    await calls.open("d")
    await checks(8.5)
    assert (calls.begun, calls.ended) == (["a", "b", "c", "d"], ["a"])
    await calls.open("e", "f")
    await checks(8.5)
    assert (len(calls.begun), calls.ended) == (6, ["a", "b", "c"])


async def test_nobody_ends_for_calls_that_left(calls):
    """Each waits for two checks: together they are more than make a message late."""
    for number in range(4):
        await calls.open(number)
        await checks(2.5)
        await calls.cancel(number)
    await checks(5)
    assert not calls.ended


async def test_a_call_that_is_being_cancelled_does_not_count(calls):
    """It is cancelled in the iteration of the event loop in which the messages become late."""
    loop = asyncio.get_running_loop()
    late_s = loop.time() + MAX_CHECKS * CHECK_INTERVAL_S
    await calls.open("d")
    loop.call_at(late_s - time.get_clock_info("monotonic").resolution / 2, calls.tasks["d"].cancel)
    await checks(8)
    assert not calls.ended
    assert calls.tasks["d"].cancelled()
