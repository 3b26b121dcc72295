"""The one place where errors become gRPC statuses, and where calls in flight are counted for draining."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from specdec.errors import InvalidRequest, Unavailable
from specdec.rpc.status import abort_with, being_cancelled

#: The health service answers everybody, while the server drains as well, and is not waited for.
HEALTH = "/grpc.health.v1.Health/"
GOING_DOWN = "the server is shutting down; use another replica"
UNDECODABLE = "a message cannot be decoded; send what protos/specdec/v1 of this version describes"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Guard: TypeAlias = Callable[[Context], AbstractAsyncContextManager[None]]
#: Opens the context in which a call is served; raises a :class:`TandemError` for one that is not.
EnterCall: TypeAlias = Callable[[Context], AbstractContextManager[None]]


def enter_anyone(context: Context) -> AbstractContextManager[None]:
    """Serve every call."""
    return nullcontext()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: domain errors become statuses, other errors INTERNAL with a fixed text, and requests that
    are no message INVALID_ARGUMENT.

    Cancellation and aborts pass through untouched. While :attr:`draining`, new calls get UNAVAILABLE.
    """

    def __init__(self, enter: EnterCall = enter_anyone) -> None:
        """Each call but those of the health service is served within ``enter(context)``."""
        self._enter = enter
        self.draining = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._evicted: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        """Calls in flight."""
        return len(self._tasks)

    async def wait_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    async def evict(self) -> None:
        """End every call with UNAVAILABLE (left to gRPC, they would end as CANCELLED) and wait for their handlers."""
        self.draining = True
        for task in self._tasks - self._evicted:
            self._evicted.add(task)
            task.cancel()
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the method's handler by one that keeps the rules above."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        guard = _statuses if method.startswith(HEALTH) else self._guard
        wrapped = _wrap(handler, getattr(handler, kind), partial(guard, method=method))
        # The wrapper decodes a single request: gRPC answers one that it cannot decode with UNKNOWN and a traceback.
        decoder = handler.request_deserializer if handler.request_streaming else None
        make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, decoder, handler.response_serializer)

    @asynccontextmanager
    async def _guard(self, context: Context, method: str) -> AsyncIterator[None]:
        """Count the call, refuse it while the server drains, and end it with a status."""
        task = asyncio.current_task()
        assert task is not None  # handlers always run in a task
        self._tasks.add(task)
        self._idle.clear()
        try:
            async with _statuses(context, method):
                if self.draining:
                    raise Unavailable(GOING_DOWN)
                with self._enter(context):
                    yield
        except asyncio.CancelledError:
            if task not in self._evicted or task.uncancel() or context.cancelled():
                raise
            await abort_with(context, Unavailable(GOING_DOWN), method)
        finally:
            self._evicted.discard(task)
            self._tasks.remove(task)
            if not self._tasks:
                self._idle.set()


@asynccontextmanager
async def _statuses(context: Context, method: str) -> AsyncIterator[None]:
    """End a call that fails with the status of its error."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
        raise
    except Exception as error:
        if context.cancelled() or being_cancelled():
            # The peer is gone: there is nobody to tell, and aborting a finished call is an error of its own.
            raise asyncio.CancelledError from error
        await abort_with(context, InvalidRequest(UNDECODABLE) if isinstance(error, DecodeError) else error, method)


def _wrap(handler: Handler, behavior: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    decode = None if handler.request_streaming else handler.request_deserializer

    def read(request: Any) -> Any:
        return request if decode is None else decode(request)

    if inspect.isasyncgenfunction(behavior):
        # Driven here rather than by gRPC, which leaves the generator of a cancelled call to the garbage collector.
        async def stream(request: Any, context: Context) -> None:
            async with guard(context), aclosing(behavior(read(request), context)) as responses:
                async for response in responses:
                    await context.write(response)

        return stream

    async def call(request: Any, context: Context) -> Any:
        async with guard(context):
            if handler.request_streaming and handler.response_streaming:
                # The first message would carry the headers. An error while it is being written would send them a
                # second time; gRPC refuses that with TOO_MANY_OPERATIONS, and the client would wait for ever.
                await context.send_initial_metadata(())
            return await behavior(read(request), context)

    return call
