"""The life of one service process: startup, serve, shutdown on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import uvloop

from specdec.errors import TandemError
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings

logger = logging.getLogger(__name__)


class Service(Protocol):
    """What a process serves."""

    #: Short name, for the ready line and the log.
    name: str

    def register(self, server: RpcServer) -> None:
        """Add the servicers. Calls may arrive before :meth:`start` is done; they get UNAVAILABLE."""
        ...

    async def start(self) -> None:
        """Load and warm up. Health turns to SERVING when this returns."""
        ...

    async def drain(self) -> None:
        """Open no new sessions; return at once, open ones go on."""
        ...

    async def stop(self) -> None:
        """Release everything. Called last, and also after a start that failed or was cancelled."""
        ...


async def serve(
    service: Service,
    settings: ServerSettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[RpcServer], None] | None = None,
) -> None:
    """Run a service until SIGTERM, SIGINT or ``stop``.

    The port is bound first, so a taken one fails before the weights are read. Shutdown order: refuse new calls,
    health NOT_SERVING, let open streams end for ``drain_s``, cancel the rest, release. A second signal skips the wait.

    Raises:
        TandemError: the service cannot start.
    """
    stop = stop or asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    server = RpcServer(settings)
    service.register(server)
    try:
        await server.start()
        if await _until(service.start(), stop):
            await server.set_serving(True)
            if on_ready is not None:
                on_ready(server)
            await stop.wait()
            logger.info("%s: draining %d calls", service.name, server.num_active_calls)
        await service.drain()
        await _until(server.drain(), hurry)
    finally:
        await server.stop()
        await service.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _until(work: Coroutine[Any, Any, Any], event: asyncio.Event) -> bool:
    """Run ``work``, cancelled as soon as ``event`` is set; True when it came to its end."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task,))
    if task.cancelled():
        return False
    task.result()
    return True


def print_ready(service: Service, server: RpcServer) -> None:
    """Print the one line a launcher waits for: JSON with the bound port."""
    line = {
        "event": "ready",
        "service": service.name,
        "host": server.settings.host,
        "port": server.port,
        "pid": os.getpid(),
    }
    print(json.dumps(line), flush=True)


def run(make_service: Callable[[], Service], settings: ServerSettings) -> int:
    """Serve in this process until it is told to stop; returns the exit status (0, or 1 when it could not start)."""

    async def main() -> None:
        service = make_service()
        await serve(service, settings, on_ready=lambda server: print_ready(service, server))

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
