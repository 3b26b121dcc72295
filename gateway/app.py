"""The gateway as a process: REST and gRPC on one event loop, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Final

import uvicorn

from gateway.acceptance_check import StartUpCheck
from gateway.access.keys import KeyRing
from gateway.backends.engines.spec import EngineSpec
from gateway.backends.fleet import Fleet
from gateway.generation import Generation
from gateway.grpc.access import enter_call
from gateway.grpc.servicer import SERVICE_NAME, GenerationServicer, add_to_server
from gateway.pacing.lookup_pacer import LookupPacer
from gateway.pacing.pace import Pacer
from gateway.pacing.target_pacer import TargetPacer
from gateway.placement.routing import Router
from gateway.requests.limits import body_limit
from gateway.rest.app import make_app
from gateway.rest.connections import Connections, guarded_http
from gateway.rest.http_protocol import limited_http
from gateway.rest.request_id import RequestIds
from gateway.text.processor import TextProcessor
from gateway.text.tokenizer import TextTokenizer
from gateway.workers.pool import WorkerPool
from specdec.errors import InvalidRequest
from specdec.process.lifecycle import print_ready, run_until_stopped
from specdec.process.open_files import cap_connections
from specdec.process.ports import bind
from specdec.process.tasks import log_failure
from specdec.rpc.certificates import Certificates
from specdec.rpc.framed.address import framed_path
from specdec.rpc.server import RpcServer
from specdec.settings import GatewaySettings, ServerSettings
from specdec.settings.listening import TlsFiles
from specdec.tracing.setup import start_tracing

logger = logging.getLogger(__name__)

#: Connections waiting to be accepted.
BACKLOG: Final = 2048
#: Bytes of an answer that the kernel keeps for a client, of which it takes twice as many. Left to itself it keeps
#: megabytes, and a client that does not read is noticed late.
SEND_BUFFER_BYTES: Final = 2**18
#: gRPC calls whose message is received at once. Each may take 16 MiB, so all take half of the 256 MiB that hostile
#: requests may cost; with fewer, half-sent messages hold up others more often.
MAX_RECEIVING: Final = 8
#: Seconds between two checks of whether targets are up, and of whether a new draft head is.
CHECK_INTERVAL_S: Final = 0.05
HEAD_CHECK_INTERVAL_S: Final = 1.0
#: Seconds until a start that waits for a target says so.
FIRST_REPORT_S: Final = 5.0


class Gateway:
    """REST and gRPC over one :class:`Generation`. Start, then stop; both once."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        router: Router | None = None,
        make_pacer: Callable[[LookupPacer], Pacer] = TargetPacer,
    ) -> None:
        """Give a ``router`` to serve backends of this process instead of ``settings.targets``, and ``make_pacer`` to
        compare another policy of drafting.

        Raises:
            InvalidRequest: the tokenizer, the chat template or the keys cannot be read, or no target is named.
        """
        if router is None and not settings.targets:
            raise InvalidRequest("targets is empty; name at least one target service as host:port", param="targets")
        self.settings = settings
        tokenizer = TextTokenizer.load(settings.tokenizer) if settings.tokenizer else None
        self._fleet: Fleet | None = None
        if router is None:
            backend_tls = Certificates(settings.backend_tls) if settings.backend_tls else None
            engines = EngineSpec.read(settings, tokenizer) if settings.has_engines and tokenizer else None
            self._fleet = Fleet(settings.targets, settings.drafts, certificates=backend_tls, engines=engines)
            router = self._fleet.router
        self._workers: WorkerPool | None = None
        if settings.tokenizer_pool_size:
            self._workers = WorkerPool(
                settings.tokenizer_pool_size,
                TextProcessor.load,
                settings,
                max_waiting=settings.max_queued_requests,
                max_wait_s=settings.max_queue_wait_s,
            )
        self._tracing = start_tracing(settings.otlp_traces_endpoint, "gateway")
        self.generation = Generation(
            router, settings, tokenizer, make_pacer=make_pacer, workers=self._workers, tracing=self._tracing
        )
        keys = KeyRing(settings)
        if settings.api_key_file is not None:
            self.generation.metrics.follow_key_file(lambda: not keys.problem)
        self._rest = _rest_server(settings, self.generation, keys)
        self._rpc = _rpc_server(settings, self.generation, keys)
        self._rest_task: asyncio.Task[None] | None = None
        self._health: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._check: asyncio.Task[None] | None = None
        self._heads_checked = asyncio.Event()
        #: The bound ports.
        self.port = 0
        self.grpc_port = 0

    async def start(self) -> None:
        """Listen on both ports; returns at once, whether or not a target is up. Call :meth:`stop` in any case.

        Raises:
            InvalidRequest: a port is taken.
        """
        listener = _listen(self.settings.host, self.settings.port)
        try:
            await self._rpc.start()
        except BaseException:
            listener.close()
            raise
        self.port, self.grpc_port = listener.getsockname()[1], self._rpc.port
        self._rest_task = asyncio.create_task(self._rest.serve(sockets=[listener]), name="rest")
        if self._fleet is not None:
            await self._fleet.start()
        self._health = asyncio.create_task(self._follow_health(), name="health")
        self._check = asyncio.create_task(self._check_heads(), name="check of heads")
        for task in (self._rest_task, self._health, self._check):
            task.add_done_callback(log_failure)
        logger.info("listening on %s:%d and gRPC %d", self.settings.host, self.port, self.grpc_port)

    async def wait_ready(self) -> None:
        """Return once a target can be used, both ports answer, and a head that is up already was checked."""
        await self._ready.wait()
        await self._heads_checked.wait()

    async def drain(self) -> None:
        """Refuse new requests and let open ones finish, for ``drain_s`` seconds at most."""
        logger.info("draining %d requests", self.generation.num_requests)
        self.generation.drain()
        self._rest.should_exit = True
        await self._rpc.drain()
        if self._rest_task is not None:
            await asyncio.wait((self._rest_task,), timeout=self.settings.drain_s + 1)

    async def stop(self) -> None:
        """End what is left and close everything."""
        if tasks := [task for task in (self._health, self._check) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if self._rest_task is not None:
            self._rest.should_exit = self._rest.force_exit = True
            await asyncio.wait((self._rest_task,))
        await self._rpc.stop()
        if self._workers is not None:
            await self._workers.close()
        if closings := self.generation.context.closings:
            await asyncio.wait(closings)
        if self._fleet is not None:
            await self._fleet.stop()
        if self._tracing is not None:
            await self._tracing.close()

    async def _follow_health(self) -> None:
        """The gRPC health of the gateway: SERVING while a target can be used."""
        serving = False
        while True:
            if (ready := self.generation.router.ready) is not serving and not self.generation.draining:
                serving = ready
                await self._rpc.set_serving(serving)
            if serving and not self._ready.is_set() and self._rest.started:
                self.generation.check_tokenizer()
                self._ready.set()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _check_heads(self) -> None:
        """Check draft heads as they come up."""
        check = StartUpCheck(self.generation)
        await self.generation.router.wait_ready()
        while not self.generation.draining:
            try:
                await check.run()
            except Exception:
                logger.exception("the self-test of the draft failed")
            self._heads_checked.set()
            await asyncio.sleep(HEAD_CHECK_INTERVAL_S)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its own signal handlers: the process has one place for signals. Certificates are ours, too."""

    def __init__(self, config: uvicorn.Config, tls: TlsFiles) -> None:
        super().__init__(config)
        config.load()
        if tls:
            config.ssl = Certificates(tls).server_context()

    def capture_signals(self) -> nullcontext[None]:  # type: ignore[override]
        """Leave the signals alone."""
        return nullcontext()


def _max_connections(settings: GatewaySettings) -> int:
    """Of REST and of gRPC each. A session over a framed socket is a connection, too."""
    num_framed = sum(any(map(framed_path, addresses)) for addresses in (settings.targets, settings.drafts))
    num_files = num_framed * settings.max_concurrent_sequences
    return cap_connections(settings.max_connections, num_other_files=num_files)


def _rest_server(settings: GatewaySettings, generation: Generation, keys: KeyRing) -> _Uvicorn:
    connections = Connections(settings, max_connections=_max_connections(settings))
    return _Uvicorn(
        uvicorn.Config(
            RequestIds(make_app(generation, keys), generation.request_log),
            http=guarded_http(limited_http(settings.max_header_bytes), connections),
            ws="none",  # by default whatever library is installed would take connections over, uncounted
            log_config=None,  # uvicorn's own handlers go; its warnings are those of the process
            log_level="warning",
            access_log=False,
            proxy_headers=bool(settings.forwarded_allow_ips),
            forwarded_allow_ips=list(settings.forwarded_allow_ips),
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(settings.drain_s)),
            timeout_keep_alive=math.ceil(settings.keep_alive_s),
        ),
        settings.tls,
    )


def _rpc_server(settings: GatewaySettings, generation: Generation, keys: KeyRing) -> RpcServer:
    server = RpcServer(
        ServerSettings(
            host=settings.host,
            port=settings.grpc_port,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            insecure=True,  # checked by the gateway's settings
            drain_s=settings.drain_s,
            # What is above the limits of requests gets its own answer, with the time to wait.
            max_message_bytes=body_limit(settings),
            max_receiving=MAX_RECEIVING,
            max_concurrent_rpcs=2 * (settings.max_concurrent_sequences + settings.max_queued_requests),
            max_connections=_max_connections(settings),
            first_message_timeout_s=settings.body_timeout_s,
            write_timeout_s=settings.write_timeout_s,
        ),
        enter=partial(enter_call, keys, generation.request_log),
    )
    server.add(add_to_server, GenerationServicer(generation), SERVICE_NAME)
    return server


def _listen(host: str, port: int) -> socket.socket:
    listener = bind(host, port)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # of its connections
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvloop sets it, asyncio's own loop does not
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


class GatewayProcess:
    """A gateway as a process of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def start(self) -> None:
        """Return once a target can be used and both ports answer."""
        await self._gateway.start()
        reporter = asyncio.create_task(self._report_waiting())
        try:
            await self._gateway.wait_ready()
        finally:
            reporter.cancel()

    async def _report_waiting(self) -> None:
        """Log what the start waits for, after growing pauses."""
        pause_s = FIRST_REPORT_S
        while True:
            await asyncio.sleep(pause_s)
            targets = self._gateway.generation.router.targets.replicas
            logger.info("waiting for a target: %s", "; ".join(f"{each.name}: {each.reason}" for each in targets))
            pause_s *= 2

    async def drain(self) -> None:
        """Let open requests finish."""
        await self._gateway.drain()

    async def close(self) -> None:
        """Close everything."""
        await self._gateway.stop()


async def serve(
    gateway: Gateway, *, stop: asyncio.Event | None = None, on_ready: Callable[[], object] | None = None
) -> None:
    """Run a gateway until SIGTERM, SIGINT or ``stop``; ``on_ready`` replaces the ready line.

    Raises:
        InvalidRequest: a port is taken.
    """

    def ready() -> None:
        # What was loaded stays: the longest garbage collection took 106 ms with it and 35 ms without.
        gc.freeze()
        if on_ready is not None:
            on_ready()
        else:
            print_ready("gateway", gateway.settings.host, gateway.port, grpc_port=gateway.grpc_port)

    await run_until_stopped(GatewayProcess(gateway), on_ready=ready, stop=stop)
