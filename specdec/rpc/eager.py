"""Coroutines that begin at once: what a task would do in the loop's next iteration is done right here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T]) -> asyncio.Task[T] | None:
    """Run ``work`` up to where it waits first; a task continues from there, None where it is at its end already.

    What it raises before it waits is raised here. (Python 3.12 has tasks that do the same.)
    """
    try:
        waited = work.send(None)
    except StopIteration:
        return None
    _mark(waited, blocking=False)
    return asyncio.get_running_loop().create_task(_finish(work, waited))


async def _finish(work: Coroutine[Any, Any, T], waited: Any) -> T:
    return await _go_on(work, waited)


def _mark(waited: Any, *, blocking: bool) -> None:
    """Between a future's ``await`` and the task that takes it a mark says that it is waited for. Others may wait for it
    in the meantime, so it is taken off and put on again.
    """
    if waited is not None:
        waited._asyncio_future_blocking = blocking


@coroutine
def _go_on(work: Coroutine[Any, Any, T], waited: Any) -> Generator[Any, Any, T]:
    """Hand on what ``work`` waits for, and to it what comes of that."""
    _mark(waited, blocking=True)
    while True:
        try:
            try:
                value = yield waited
            except BaseException as error:
                waited = work.throw(error)
            else:
                waited = work.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
