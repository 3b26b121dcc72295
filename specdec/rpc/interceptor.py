"""The one place where errors become gRPC statuses, and where calls in progress are counted for draining."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from specdec.errors import Cancelled, DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from specdec.rpc.call import Call
from specdec.rpc.peer import address_of
from specdec.rpc.receiving import ReceivingSlots
from specdec.rpc.status import abort_with, being_cancelled

#: The health service answers everybody, while the server drains as well, and is not waited for.
HEALTH: Final = "/grpc.health.v1.Health/"
#: Calls of the health service whose message is received at once: more than one, so that a half-sent one holds up no
#: other, and few, for each may take as much memory as a request.
HEALTH_SLOTS: Final = 4
#: Calls of the health service that one client, by address, has open at once; one more ends its oldest. An open watch
#: takes 27 KB, so these take 7 MB. One address may stand for many gateways, with a watch each.
MAX_CLIENT_HEALTH_CALLS: Final = 256
GOING_DOWN: Final = "the server is shutting down; use another replica"
UNDECODABLE: Final = "a message cannot be decoded; send what protos/specdec/v1 of this version describes"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Guard: TypeAlias = Callable[[Context], AbstractAsyncContextManager[Call]]
#: Opens the context in which a call is served; raises a :class:`TandemError` for one that is not.
EnterCall: TypeAlias = Callable[[Context], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """How many calls a server has open at once, and how long their clients may keep it waiting."""

    max_calls: int
    #: Calls whose first message is received at once; more wait. The health service has slots of its own.
    max_receiving: int
    first_message_timeout_s: float
    #: Seconds a client may take for one message.
    write_timeout_s: float

    @property
    def sweep_s(self) -> float:
        """Seconds between two checks of all calls."""
        return min(1.0, self.first_message_timeout_s / 4, self.write_timeout_s / 4)


def enter_anyone(context: Context) -> AbstractContextManager[None]:
    """Serve every call."""
    return nullcontext()


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: domain errors become statuses, other errors INTERNAL with a fixed text, and requests that
    are no message INVALID_ARGUMENT.

    Cancellation and aborts pass through untouched. While :attr:`draining`, new calls get UNAVAILABLE. A call whose
    client keeps the server waiting is ended (:class:`CallLimits`).
    """

    def __init__(self, limits: CallLimits, enter: EnterCall = enter_anyone) -> None:
        """Each call but those of the health service is served within ``enter(context)``."""
        self._limits = limits
        self._enter = enter
        self.draining = False
        self._slots, self._health_slots = ReceivingSlots(limits.max_receiving), ReceivingSlots(HEALTH_SLOTS)
        self._calls: set[Call] = set()
        #: Oldest first, with their clients.
        self._health_calls: dict[Call, str] = {}
        self._num_health_calls_of: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def num_active(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    async def wait_idle(self) -> None:
        """Return once no call is in progress."""
        await self._idle.wait()

    async def evict(self) -> None:
        """End every call with UNAVAILABLE (left to gRPC, they would end as CANCELLED) and wait for their handlers."""
        self.draining = True
        for call in self._calls:
            call.cancel(Unavailable(GOING_DOWN))
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
        guard = self._guard_health if method.startswith(HEALTH) else self.guard
        wrapped = _wrap(handler, getattr(handler, kind), partial(guard, method=method))
        # Served as a stream of requests, whatever the client sends: gRPC waits for ever for a single one, and answers
        # one that it cannot decode with UNKNOWN and a traceback.
        make: Callable[..., Handler] = getattr(grpc, f"stream_{kind.partition('_')[2]}_rpc_method_handler")
        decoder = handler.request_deserializer if handler.request_streaming else None
        return make(wrapped, decoder, handler.response_serializer)

    @asynccontextmanager
    async def guard(self, context: Context, method: str) -> AsyncIterator[Call]:
        """Count the call, refuse it while the server drains or is full, and end it with a status."""
        call = Call(context, self._release, self._slots)
        self._calls.add(call)
        self._idle.clear()
        self._watch()
        try:
            async with _statuses(call, method):
                if self.draining:
                    raise Unavailable(GOING_DOWN)
                if len(self._calls) > self._limits.max_calls:
                    self._make_room(call)
                with self._enter(context):
                    yield call
        finally:
            self._release(call)

    @asynccontextmanager
    async def _guard_health(self, context: Context, method: str) -> AsyncIterator[Call]:
        """The same for a call of the health service, which is always served."""
        call, client = Call(context, self._release_health, self._health_slots), address_of(context.peer())
        self._health_calls[call] = client
        self._num_health_calls_of[client] += 1
        if self._num_health_calls_of[client] > MAX_CLIENT_HEALTH_CALLS:
            oldest = next(other for other, owner in self._health_calls.items() if owner == client and not other.end)
            oldest.cancel(Overloaded(f"one client has {MAX_CLIENT_HEALTH_CALLS} health calls open, which is the limit"))
        self._watch()
        try:
            async with _statuses(call, method):
                yield call
        finally:
            self._release_health(call)

    def _release(self, call: Call) -> None:
        """Stop counting a call. Idempotent."""
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    def _release_health(self, call: Call) -> None:
        """The same for a call of the health service."""
        client = self._health_calls.pop(call, None)
        if client is not None:
            self._num_health_calls_of[client] -= 1
            if not self._num_health_calls_of[client]:
                del self._num_health_calls_of[client]

    def _make_room(self, call: Call) -> None:
        """End the call that has waited longest for its first message; where none does, refuse this one."""
        waiting = [other for other in self._calls if other is not call and other.reading_since_s and not other.end]
        text = f"{self._limits.max_calls} calls are open, which is the limit"
        if not waiting:
            raise Overloaded(f"{text}; try again later")
        oldest = min(waiting, key=lambda other: other.reading_since_s or 0.0)
        oldest.cancel(Overloaded(f"{text}, and this one has sent nothing; send the request at once"))

    def _watch(self) -> None:
        """Check the calls' times while there are calls."""
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._end_late_calls)

    def _end_late_calls(self) -> None:
        self._sweep = None
        calls, now_s, limits = (*self._calls, *self._health_calls), time.monotonic(), self._limits
        for call in calls:
            if call.reading_since_s is not None and now_s - call.reading_since_s > limits.first_message_timeout_s:
                call.cancel(
                    DeadlineExceeded(f"no message came within {limits.first_message_timeout_s:g} s; send it at once")
                )
            elif call.writing_since_s is not None and now_s - call.writing_since_s > limits.write_timeout_s:
                call.cancel(Cancelled(f"the client took no message for {limits.write_timeout_s:g} s"))
        if calls:
            self._watch()


@asynccontextmanager
async def _statuses(call: Call, method: str) -> AsyncIterator[None]:
    """End a call that fails with the status of its error."""
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
        raise
    except asyncio.CancelledError:
        if not call.take_cancellation() or call.end is None or call.cancelled():
            raise
        call.release_soon()
        await abort_with(call.context, call.end, method)
    except Exception as error:
        if call.cancelled() or being_cancelled():
            # The peer is gone: there is nobody to tell, and aborting a finished call is an error of its own.
            raise asyncio.CancelledError from error
        await abort_with(call.context, InvalidRequest(UNDECODABLE) if isinstance(error, DecodeError) else error, method)


def _wrap(handler: Handler, behavior: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    async def request_of(call: Call) -> Any:
        if handler.request_streaming:
            return call.messages()
        message = await call.read()
        if message is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message; send one")
        return message if handler.request_deserializer is None else handler.request_deserializer(message)

    async def begin(call: Call) -> None:
        if handler.response_streaming:
            # The first message would carry the headers. An error while it is being written would send them a second
            # time; gRPC refuses that with TOO_MANY_OPERATIONS, and the client would wait for ever.
            await call.send_initial_metadata(())

    if inspect.isasyncgenfunction(behavior):
        # Driven here rather than by gRPC, which leaves the generator of a cancelled call to the garbage collector.
        async def stream(_: Any, context: Context) -> None:
            async with guard(context) as call:
                await begin(call)
                async with aclosing(behavior(await request_of(call), call)) as responses:
                    async for response in responses:
                        await call.write(response)

        return stream

    async def answer(_: Any, context: Context) -> Any:
        async with guard(context) as call:
            await begin(call)
            return await behavior(await request_of(call), call)

    return answer
