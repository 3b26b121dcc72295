"""The messages that one side of a stream sends: in order, one at a time, each as early as can be."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from specdec.rpc import eager

M = TypeVar("M")


class Outlet(Generic[M]):
    """Writes messages in order without anybody waiting for it; gRPC takes one at a time.

    Where none is under way a message leaves within :meth:`post` itself: a task of its own would begin a turn of the
    loop later.
    """

    def __init__(self, write: Callable[[M], Coroutine[Any, Any, Any]]) -> None:
        """``write`` sends one message; it raises where that fails."""
        self._send = write
        self._waiting: deque[M] = deque()
        self._writing: asyncio.Task[None] | None = None
        #: Why a message could not be written; nothing is written after it.
        self.failure: Exception | None = None

    def post(self, message: M) -> None:
        """Send a message; dropped where an earlier one failed."""
        if self.failure is None:
            self._waiting.append(message)
            if self._writing is None or self._writing.done():
                self._writing = eager.start(self._write())

    async def drain(self) -> None:
        """Return once all messages have left, or raise what went wrong with one."""
        if self._writing is not None and not self._writing.done():
            await asyncio.wait((self._writing,))
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        """Drop what has not left. Idempotent, never raises."""
        self._waiting.clear()
        if self._writing is not None and not self._writing.done():
            self._writing.cancel()
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        try:
            while self._waiting:
                await self._send(self._waiting.popleft())
        except Exception as error:
            self.failure = error
            self._waiting.clear()
