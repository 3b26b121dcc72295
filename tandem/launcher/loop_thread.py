"""An event loop on a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from specdec.errors import InvalidRequest

T = TypeVar("T")


def at_exit(function: Callable[[], object]) -> None:
    """Call ``function`` when the interpreter ends, while threads can still be started and executors used.

    ``atexit`` itself is too late for that: by then ``asyncio.to_thread`` refuses to work.
    """
    register: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(function)


class BackgroundLoop:
    """Runs coroutines on its thread; the caller waits for their results."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that has the thread: a fork has a copy without it."""
        return os.getpid() == self._pid

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end.

        A KeyboardInterrupt cancels it, waits until it has cleaned up, and is raised. In a fork, which would wait
        forever, it is an :class:`InvalidRequest`.
        """
        if not self.is_here:
            work.close()
            raise InvalidRequest(
                f"this LLM is a fork's copy of that in process {self._pid}; make a new one here, or start processes by"
                " spawn (multiprocessing.get_context)"
            )
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = self.submit(watched())
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(timeout=30)
            raise

    def close(self) -> None:
        """End the thread. Idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
