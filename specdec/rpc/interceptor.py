"""The one place where errors become gRPC statuses, and where calls in flight are counted for draining."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from specdec.errors import Unavailable
from specdec.rpc.status import abort_with, being_cancelled

#: Methods of these services are served while the server drains, and are not waited for.
INFRASTRUCTURE = ("/grpc.health.v1.Health/", "/grpc.reflection.")
GOING_DOWN = "the server is shutting down; use another replica"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: domain errors become statuses, other errors INTERNAL with a fixed text.

    Cancellation and aborts pass through untouched. While :attr:`draining`, new calls get UNAVAILABLE.
    """

    def __init__(self) -> None:
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
        if handler is None or method.startswith(INFRASTRUCTURE):
            return handler
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        wrapped = self._wrap(getattr(handler, kind), method)
        make: Callable[..., Handler] = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    def _wrap(self, behavior: Callable[..., Any], method: str) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behavior):
            # Driven here rather than by gRPC, which leaves the generator of a cancelled call to the garbage collector.
            async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
                async with self._guard(context, method), aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

            return stream

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._guard(context, method):
                return await behavior(request, context)

        return call

    @asynccontextmanager
    async def _guard(self, context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None  # handlers always run in a task
        self._tasks.add(task)
        self._idle.clear()
        try:
            if self.draining:
                raise Unavailable(GOING_DOWN)
            yield
        except asyncio.CancelledError:
            if task not in self._evicted or task.uncancel() or context.cancelled():
                raise
            await abort_with(context, Unavailable(GOING_DOWN), method)
        except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            raise
        except Exception as error:
            if context.cancelled() or being_cancelled():
                # The peer is gone: there is nobody to tell, and aborting a finished call is an error of its own.
                raise asyncio.CancelledError from error
            await abort_with(context, error, method)
        finally:
            self._evicted.discard(task)
            self._tasks.remove(task)
            if not self._tasks:
                self._idle.set()
