"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

T = TypeVar("T")

#: Items that wait for the consumer at most; then the producers wait.
MAX_WAITING: Final = 64


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Run all streams at once. The first error ends them all; leaving early closes them all.

    One stream begins in each iteration of the event loop: that of a sample first encodes its prompt for the services.
    A single one is returned as it is.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(MAX_WAITING)

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put((item,))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def begin() -> None:
        for stream in streams:
            tasks.append(asyncio.create_task(pump(stream)))
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    try:
        await begin()
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if isinstance(entry, BaseException):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
