"""The messages that one side of a stream sends: in order, one at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

M = TypeVar("M")


class StreamWriter(Generic[M]):
    """Writes messages in order without anybody waiting for it; gRPC takes one at a time."""

    def __init__(self, write: Callable[[M], Coroutine[Any, Any, Any]]) -> None:
        """``write`` sends one message; it raises where that fails."""
        self._send = write
        self._waiting: deque[M] = deque()
        self._is_writing = False
        #: What continues with messages that were posted.
        self._task: asyncio.Task[None] | None = None
        #: Why a message could not be written; nothing is written after it.
        self.failure: Exception | None = None

    @property
    def num_waiting(self) -> int:
        """Messages that have not left."""
        return len(self._waiting)

    def post(self, message: M) -> None:
        """Send a message; dropped where an earlier one failed."""
        if self.failure is None:
            self._waiting.append(message)
            if not self._is_writing:
                self._is_writing = True
                self._task = asyncio.get_running_loop().create_task(self._write())

    async def send(self, message: M) -> None:
        """Send a message and wait until it has left, or raise what went wrong. For one caller at a time; cancelling it
        stops the write.
        """
        if self._is_writing:
            self.post(message)
            await self.drain()
            return
        if self.failure is None:
            self._waiting.append(message)
            await self._write()
        if self.failure is not None:
            raise self.failure

    async def drain(self) -> None:
        """Return once all that was posted has left, or raise what went wrong with it."""
        if self._task is not None and not self._task.done():
            await asyncio.wait((self._task,))
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Drop what has not left. Idempotent, never raises."""
        self._waiting.clear()
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait((self._task,))
            self._is_writing = False  # the task may have been cancelled before it began

    async def _write(self) -> None:
        self._is_writing = True
        try:
            while self._waiting:
                await self._send(self._waiting.popleft())
        except Exception as error:
            self.failure = error
            self._waiting.clear()
        finally:
            self._is_writing = False
