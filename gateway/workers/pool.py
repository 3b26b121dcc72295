"""A bounded pool of worker processes, for work that would hold up the event loop.

Threads would not do: reading JSON holds Python's lock throughout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from gateway.workers.connection import Closed
from gateway.workers.process import WorkerProcess
from gateway.workers.threads import FairThreads
from gateway.workers.worker import TOO_LARGE, WorkerLimits
from specdec.errors import InvalidRequest

T = TypeVar("T")


class WorkerPool:
    """Calls functions in processes, each of which starts at its first call. All methods belong to one event loop."""

    def __init__(
        self, size: int, make: Callable[..., Any], *arguments: Any, max_waiting: int = 512, max_wait_s: float = 30.0
    ) -> None:
        """Each worker calls ``make(*arguments)`` once, and functions get the result. Everything must be picklable."""
        self._workers = [WorkerProcess(WorkerLimits(), make, *arguments) for _ in range(size)]
        self._idle = [*self._workers]
        self._threads = FairThreads(size, "large requests", max_waiting=max_waiting, max_wait_s=max_wait_s)

    async def run(
        self,
        function: Callable[..., T],
        raw: bytes,
        *arguments: Any,
        client: str = "",
        on_begin: Callable[[asyncio.Future[T]], None] = lambda _: None,
    ) -> T:
        """``function(state, raw, *arguments)`` of a worker, whose state is what ``make`` returned. The queue is fair by
        client.

        ``on_begin`` gets the call, which holds ``raw`` until it is done.

        A cancelled call leaves the queue. One that has begun keeps its worker to its end: a new worker takes longer to
        start than most calls take, so clients that leave would hold up the others.

        Raises:
            Overloaded: too many calls wait, or the call waited for too long.
            InvalidRequest: the call takes too much memory.
        """
        return await self._threads.run(self._call, function, raw, arguments, client=client, on_begin=on_begin)

    def _call(self, function: Callable[..., T], raw: bytes, arguments: Any) -> T:
        worker = self._idle.pop()  # there are as many as threads
        try:
            # One that had ended or was killed from outside is started again; what ends two of them is the work.
            for _ in range(2):
                with suppress(Closed):
                    result, error = worker.call(function, raw, *arguments)
                    if error is not None:
                        raise error
                    return result  # type: ignore[no-any-return]
            raise InvalidRequest(TOO_LARGE)
        finally:
            self._idle.append(worker)

    async def close(self) -> None:
        """End all workers, whatever they do."""
        self._threads.close(wait=False)
        for worker in self._workers:
            worker.kill()
        await asyncio.to_thread(self._threads.close)
        for worker in self._workers:
            worker.end()
