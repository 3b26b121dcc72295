"""A model service as a process: its gRPC server, and the order in which both start and stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Protocol

from specdec.errors import InternalError, TandemError
from specdec.process.lifecycle import print_ready, run_main, run_until_stopped
from specdec.rpc.call_span import span_of_call
from specdec.rpc.interceptor import enter_anyone
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.tracing.setup import start_tracing

logger = logging.getLogger(__name__)


class Service(Protocol):
    """What a process serves."""

    #: Short name, for the ready line and the log.
    name: str

    def register(self, server: RpcServer) -> None:
        """Add the servicers. Calls may arrive before :meth:`start` is done; they get UNAVAILABLE."""
        ...

    async def start(self) -> None:
        """Load and warm up. Health becomes SERVING when this returns."""
        ...

    async def wait_failed(self) -> InternalError:
        """Return once nothing can be served any more: the process ends. Called after :meth:`start`."""
        ...

    async def drain(self) -> None:
        """Open no new sessions; return at once, open ones continue."""
        ...

    async def stop(self) -> None:
        """Release everything. Called last, and also after a start that failed or was cancelled."""
        ...


class ServiceProcess:
    """A service behind its server.

    The port is bound first, so a taken one fails before the weights are read. Shutdown order: refuse new calls,
    health NOT_SERVING, let open streams end for ``drain_s``, cancel the rest, release.
    """

    def __init__(self, service: Service, settings: ServerSettings, stop: asyncio.Event) -> None:
        """``stop`` is set when the service fails."""
        self._service = service
        self._stop = stop
        self._watch: asyncio.Task[None] | None = None
        #: What ended the service.
        self.failure: InternalError | None = None
        self._tracing = tracing = start_tracing(settings.otlp_traces_endpoint, service.name)
        enter = enter_anyone if tracing is None else partial(span_of_call, tracing, f"{service.name} session")
        self._server = RpcServer(settings, enter=enter)
        service.register(self._server)

    async def start(self) -> None:
        """Listen, load, and tell health checks."""
        await self._server.start()
        await self._service.start()
        await self._server.set_serving(True)
        self._watch = asyncio.create_task(self._wait_failed(), name="failure of the service")

    async def _wait_failed(self) -> None:
        self.failure = await self._service.wait_failed()
        self._stop.set()

    def print_ready(self) -> None:
        """Print the ready line."""
        more = {"health_port": self._server.health_port} if self._server.health_port else {}
        print_ready(self._service.name, self._server.settings.host, self._server.port, **more)

    async def drain(self) -> None:
        """Refuse new sessions and calls, and wait for open ones."""
        logger.info("%s: draining %d calls", self._service.name, self._server.num_active_calls)
        await self._service.drain()
        await self._server.drain()

    async def close(self) -> None:
        """End what is left and release the service."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.stop()
        await self._service.stop()
        if self._tracing is not None:
            await self._tracing.close()


async def serve(
    service: Service,
    settings: ServerSettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[], object] | None = None,
) -> None:
    """Run a service until SIGTERM, SIGINT or ``stop``; ``on_ready`` replaces the ready line.

    Raises:
        TandemError: the service cannot start, or an unexpected error has ended it.
    """
    stop = stop or asyncio.Event()
    process = ServiceProcess(service, settings, stop)
    await run_until_stopped(process, on_ready=on_ready or process.print_ready, stop=stop)
    if process.failure is not None:
        raise process.failure


def run(make_service: Callable[[], Service], settings: ServerSettings) -> int:
    """Serve in this process until it is told to stop; returns the exit status: 0, or 1 where the start or the service
    failed.
    """
    try:
        run_main(lambda: serve(make_service(), settings), log_level=settings.log_level, log_format=settings.log_format)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
