"""Which of the messages being received end for those that wait."""

import asyncio
import time
from contextlib import suppress

import pytest

from specdec.rpc import receiving
from specdec.rpc.receiving import ReceivingSlots

CHECK_S = 0.01


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(receiving, "CHECK_INTERVAL_S", CHECK_S)


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
async def calls():
    calls = Calls(3)
    await calls.open("a", "b", "c")
    yield calls
    await calls.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (no event tells it)
            await asyncio.sleep(CHECK_S / 2)


async def test_as_many_end_as_wait_the_oldest_first(calls):
    await calls.open("d")
    await until(lambda: "d" in calls.begun)
    await asyncio.sleep(5 * CHECK_S)
    assert calls.ended == ["a"]
    await calls.open("e", "f")
    await until(lambda: len(calls.begun) == 6)
    assert calls.ended == ["a", "b", "c"]


async def test_nobody_ends_for_calls_that_left(calls):
    """Each waits for two checks: together they are more than make a message late."""
    for number in range(4):
        await calls.open(number)
        await asyncio.sleep(2.5 * CHECK_S)
        await calls.cancel(number)
    await asyncio.sleep(5 * CHECK_S)
    assert not calls.ended


async def test_a_call_that_is_being_cancelled_does_not_count(calls):
    """It is cancelled in the iteration of the event loop in which the messages become late."""
    await calls.open("d")
    await asyncio.sleep(2.5 * CHECK_S)
    asyncio.get_running_loop().call_soon(calls.tasks["d"].cancel)
    time.sleep(CHECK_S)  # noqa: ASYNC251 (the check is due as well)
    await until(calls.tasks["d"].done)
    await asyncio.sleep(5 * CHECK_S)
    assert not calls.ended
