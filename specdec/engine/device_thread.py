"""The one thread that owns the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs functions one after another on a thread of its own, for callers on an event loop."""

    def __init__(self, name: str = "device", num_threads: int | None = None) -> None:
        """Start the thread; ``num_threads`` is torch's thread count on it (None leaves torch's default)."""
        raise NotImplementedError

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``fn`` on the thread and return its result or raise its exception.

        Calls run in the order they were made. Cancelling the caller drops a call that has not started; one that has
        started runs to its end and its result is dropped.

        Raises:
            Unavailable: the thread is closed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Finish what was queued before this call, end the thread and join it. Idempotent; not from the thread itself."""
        raise NotImplementedError
