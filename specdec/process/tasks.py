"""Tasks that run as long as their process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from specdec.errors import InternalError

logger = logging.getLogger(__name__)


def log_failure(task: asyncio.Task[Any]) -> None:
    """A done callback: log the error that ended a task. asyncio does so only once nobody holds the task any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("task %s ended by an unexpected error", task.get_name(), exc_info=error)


def call_each(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call; the log has their errors."""
    for call in calls:
        try:
            call()
        except Exception:
            logger.exception("one of several calls failed; the others are made")


def failing(fail: Callable[[InternalError], object]) -> Callable[[asyncio.Task[Any]], None]:
    """A done callback: log the error that ended a task, and call ``fail`` with an :class:`InternalError` of it."""

    def done(task: asyncio.Task[Any]) -> None:
        log_failure(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            fail(InternalError(f"{task.get_name()} ended by an unexpected error: {error}"))

    return done
