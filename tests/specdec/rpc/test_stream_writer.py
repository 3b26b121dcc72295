"""Messages in order, one at a time, and what closing and failures leave."""

import asyncio

import pytest

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
def writer(wire):
    return StreamWriter(wire.write)


async def test_a_message_is_begun_when_the_one_before_has_left(wire, writer):
    for message in range(3):
        writer.post(message)
    await asyncio.sleep(0)
    assert wire.begun == [0]
    await writer.drain()
    assert wire.begun == wire.left == [0, 1, 2]
    writer.post(3)
    await writer.drain()
    assert wire.left[-1] == 3


async def test_sending_waits_for_what_was_posted_before_and_posts_wait_for_what_is_sent(wire, writer):
    writer.post(0)
    await writer.send(1)
    assert wire.left == [0, 1]
    sending = asyncio.create_task(writer.send(2))
    await asyncio.sleep(0)
    writer.post(3)
    assert wire.begun == [0, 1, 2]
    await sending
    assert wire.left == [0, 1, 2, 3]
    wire.error = ValueError("gone")
    with pytest.raises(ValueError, match="gone"):
        await writer.send(4)
    with pytest.raises(ValueError, match="gone"):
        await writer.send(5)
    assert wire.begun == [0, 1, 2, 3, 4]


async def test_after_a_failure_nothing_is_written(wire, writer):
    wire.error = ValueError("gone")
    writer.post(0)
    writer.post(1)
    with pytest.raises(ValueError, match="gone"):
        await writer.drain()
    wire.error = None
    writer.post(2)
    assert wire.begun == [0]
    with pytest.raises(ValueError, match="gone"):
        await writer.drain()
    await writer.close()


@pytest.mark.parametrize("begun", [[], [0]])
async def test_closing_drops_what_waits(wire, writer, begun):
    writer.post(0)
    writer.post(1)
    if begun:
        await asyncio.sleep(0)
    await writer.close()
    await writer.close()
    assert wire.begun == begun
    assert wire.left == []
    assert len(asyncio.all_tasks()) == 1
