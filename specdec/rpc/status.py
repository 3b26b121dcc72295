"""Errors in transit over gRPC: a domain error as status and trailing metadata, and the status as an error again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from specdec.errors import InvalidRequest, Overloaded, TandemError, error_from_status, status_of, text_of

logger = logging.getLogger(__name__)

#: Trailing metadata that carries what the text alone does not.
RETRY_AFTER_KEY: Final = "tandem-retry-after-s"
PARAM_KEY: Final = "tandem-param"


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    """End a call with the status of an error. The text of an unexpected one stays here, in the log."""
    if not isinstance(error, TandemError):
        logger.error("unexpected error in %s", method, exc_info=error)
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        metadata = ((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"),)
    elif isinstance(error, InvalidRequest) and error.param:
        metadata = ((PARAM_KEY, error.param),)
    await context.abort(grpc.StatusCode[status_of(error).grpc], text_of(error), metadata)


def error_from_rpc(error: grpc.aio.AioRpcError) -> TandemError:
    """The domain error behind a failed call."""
    return rebuild_error(error.code().name, error.details() or "", dict(error.trailing_metadata() or ()))


def rebuild_error(code: str, text: str, metadata: Mapping[str, str | bytes]) -> TandemError:
    """The domain error behind the name of a status, its text and its metadata."""
    rebuilt = error_from_status(code, text or code)
    if isinstance(rebuilt, Overloaded) and (seconds := metadata.get(RETRY_AFTER_KEY)) is not None:
        rebuilt.retry_after_s = float(seconds)
    elif isinstance(rebuilt, InvalidRequest) and (param := metadata.get(PARAM_KEY)) is not None:
        rebuilt.param = param if isinstance(param, str) else param.decode()
    return rebuilt


def being_cancelled() -> bool:
    """Whether the running task was asked to stop. (A cancelled gRPC call raises CancelledError in any task.)"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
