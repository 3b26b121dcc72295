"""Threads that calls wait for in a bounded queue, fair between clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from specdec.process.logs import log_bug
from specdec.scheduling.admission import Admission

T = TypeVar("T")


class FairThreads:
    """Calls functions on threads, for one event loop."""

    def __init__(self, size: int, what: str, *, max_waiting: int = 512, max_wait_s: float = 30.0) -> None:
        """``what`` waits, in messages of refused calls, such as "large requests"."""
        self._threads = ThreadPoolExecutor(size, what)
        self._admission: Admission[bool] = Admission(
            max_open=size,
            max_waiting=max_waiting,
            max_wait_s=max_wait_s,
            undo=lambda _: None,
            describe=lambda: f"{self._admission.num_waiting} {what} wait to be read",
        )

    async def run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        client: str = "",
        on_begin: Callable[[asyncio.Future[T]], None] = lambda _: None,
    ) -> T:
        """``function(*arguments)`` on a thread. ``on_begin`` gets the call once it has one.

        A cancelled call leaves the queue. One that has begun keeps its thread to its end.

        Raises:
            Overloaded: too many calls wait, or the call waited for too long.
        """
        await self._admission.admit(lambda: True, client=client)
        call = asyncio.ensure_future(self._call(client, function, arguments))
        call.add_done_callback(log_bug)
        on_begin(call)
        return await asyncio.shield(call)

    async def _call(self, client: str, function: Callable[..., T], arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        finally:
            self._admission.leave(client)

    def close(self, *, wait: bool = True) -> None:
        """Begin no more calls. With ``wait`` this blocks until those that have begun are done."""
        self._threads.shutdown(wait=wait)
