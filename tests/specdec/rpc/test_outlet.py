"""Messages in order, each begun at once; coroutines that begin at once."""

import asyncio

import pytest

from specdec.rpc import eager
from specdec.rpc.stream_writer import StreamWriter


class Wire:
    """Notes when a message is begun and when it has left; each takes an iteration of the loop while ``slow``."""

    def __init__(self):
        self.begun = []
        self.left = []
        self.slow = True
        self.error = None

    async def write(self, message):
        self.begun.append(message)
        if self.slow:
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.left.append(message)


@pytest.fixture
def wire():
    return Wire()


@pytest.fixture
def outlet(wire):
    return StreamWriter(wire.write)


async def test_a_message_is_begun_at_once_and_the_next_when_it_has_left(wire, outlet):
    for message in range(3):
        outlet.post(message)
    assert wire.begun == [0]
    await outlet.drain()
    assert wire.begun == wire.left == [0, 1, 2]
    outlet.post(3)
    assert wire.begun[-1] == 3
    await outlet.drain()


async def test_messages_that_leave_at_once_need_no_task(wire, outlet):
    wire.slow = False
    for message in range(3):
        outlet.post(message)
    assert wire.left == [0, 1, 2]
    assert len(asyncio.all_tasks()) == 1
    await outlet.drain()


async def test_sending_waits_for_what_was_posted_before_and_posts_wait_for_what_is_sent(wire, outlet):
    outlet.post(0)
    await outlet.send(1)
    assert wire.left == [0, 1]
    sending = asyncio.create_task(outlet.send(2))
    await asyncio.sleep(0)
    outlet.post(3)
    assert wire.begun == [0, 1, 2]
    await sending
    assert wire.left == [0, 1, 2, 3]
    wire.error = ValueError("gone")
    with pytest.raises(ValueError, match="gone"):
        await outlet.send(4)
    with pytest.raises(ValueError, match="gone"):
        await outlet.send(5)
    assert wire.begun == [0, 1, 2, 3, 4]


async def test_after_a_failure_nothing_is_written(wire, outlet):
    wire.error = ValueError("gone")
    outlet.post(0)
    outlet.post(1)
    with pytest.raises(ValueError, match="gone"):
        await outlet.drain()
    wire.error = None
    outlet.post(2)
    assert wire.begun == [0]
    with pytest.raises(ValueError, match="gone"):
        await outlet.drain()
    await outlet.close()


async def test_closing_drops_what_waits(wire, outlet):
    outlet.post(0)
    outlet.post(1)
    await outlet.close()
    await outlet.close()
    assert wire.begun == [0]
    assert wire.left == []
    assert len(asyncio.all_tasks()) == 1


async def test_an_eager_coroutine_runs_to_where_it_waits_and_then_to_its_end():
    future, waiting, seen = asyncio.get_running_loop().create_future(), asyncio.Event(), []

    async def work():
        seen.append("begun")
        seen.append(await future)
        await asyncio.sleep(0)
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("end")

    task = eager.start(work())
    assert seen == ["begun"]
    future.set_result("value")
    await waiting.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert seen == ["begun", "value", "end"]


async def test_an_eager_coroutine_gives_its_result_and_its_error():
    future = asyncio.get_running_loop().create_future()

    async def wait():
        return await future

    async def fail():
        raise KeyError("at once")

    tasks = [eager.start(wait()) for _ in range(2)]
    future.set_result(7)
    assert await asyncio.gather(*tasks) == [7, 7]
    late = asyncio.get_running_loop().create_future()
    task = eager.start(_await(late))
    late.set_exception(ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        await task
    with pytest.raises(KeyError, match="at once"):
        eager.start(fail())


async def _await(future):
    return await future
