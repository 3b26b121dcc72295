"""A gRPC server with our options, health and reflection, and the order in which it stops."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_NAME
from grpc_reflection.v1alpha import reflection

from specdec.errors import InvalidRequest
from specdec.process.open_files import cap_connections
from specdec.process.ports import check_port
from specdec.rpc.certificates import Certificates
from specdec.rpc.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS, MIN_PING_INTERVAL_MS
from specdec.rpc.framed.address import framed_path
from specdec.rpc.framed.server import FramedServer, Handlers, streaming_handlers
from specdec.rpc.health import HealthServicer
from specdec.rpc.interceptor import CallInterceptor, CallLimits, EnterCall, enter_anyone
from specdec.rpc.metadata_limit import limit_metadata
from specdec.settings import ServerSettings

logger = logging.getLogger(__name__)

#: Calls of one connection, in multiples of the server's limit; more wait in the client.
MAX_CALLS_PER_CONNECTION: Final = 2
#: Milliseconds a new connection gets to begin with HTTP/2.
HANDSHAKE_TIMEOUT_MS: Final = 10_000
#: Milliseconds after which a connection without calls is closed; clients open another one when they need it.
MAX_IDLE_MS: Final = 300_000
#: Connections to the port for health checks, and calls in progress there, at 27 KB each; milliseconds that a connection
#: without a call stays, since a probe makes a new one; bytes of a call's message, which holds the name of a service.
MAX_PROBES: Final = 256
PROBE_IDLE_MS: Final = 5_000
MAX_PROBE_BYTES: Final = 1024
#: Connections of the framed socket that are no calls: they wait for headers, or to take a status.
SPARE_CONNECTIONS: Final = 64
#: Milliseconds a client may take to acknowledge the server's settings. Until then the core lets it send 16 MiB of
#: headers, which take 45 MB of memory; it cannot acknowledge within them.
SETTINGS_TIMEOUT_MS: Final = 5_000
#: Calls that gRPC holds until the event loop takes them; it ends more of them with a bare CANCELLED.
MAX_PENDING_CALLS: Final = 8_192
SERVER_OPTIONS: Final = (
    *MESSAGE_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # The name that grpcio reads; the documented "min_recv_…" is ignored and idle watches end in GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # With port sharing two servers on one port would both start and split the calls between them.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.http2.settings_timeout", SETTINGS_TIMEOUT_MS),
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
)


class RpcServer:
    """One listening server. Health is NOT_SERVING until :meth:`set_serving` is called.

    Stopping is :meth:`drain` (refuse new calls, let open ones end) and then :meth:`stop`.
    """

    def __init__(self, settings: ServerSettings, *, enter: EnterCall = enter_anyone) -> None:
        """``enter``: see :class:`CallInterceptor`."""
        limit_metadata()
        self.settings = settings
        self.port = 0
        self._calls = CallInterceptor(
            CallLimits(
                max_calls=settings.max_concurrent_rpcs,
                max_receiving=settings.max_receiving or settings.max_concurrent_rpcs,
                first_message_timeout_s=settings.first_message_timeout_s,
                write_timeout_s=settings.write_timeout_s,
            ),
            enter,
        )
        # The limit of calls is ours: gRPC's own would count health checks and calls that have sent nothing.
        options: tuple[tuple[str, int], ...] = (
            *SERVER_OPTIONS,
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION * settings.max_concurrent_rpcs),
            # Else calls of a client that has just been told to try again are refused without a word.
            ("grpc.http2.max_deallocating_streams", MAX_CALLS_PER_CONNECTION * settings.max_concurrent_rpcs),
            ("grpc.max_allowed_incoming_connections", cap_connections(settings.max_connections)),
        )
        if settings.max_receiving is not None:
            options += (("grpc.http2.bdp_probe", 0),)  # else calls that wait for a slot may send megabytes as well
        self._server = grpc.aio.server(options=options, interceptors=[self._calls])
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((self._health.list_handler(),))
        self._names: list[str] = []
        self._streaming: Handlers = {}
        #: Serves the streams of clients on this machine.
        self._framed: FramedServer | None = None
        #: Probes have no certificates.
        self._health_server: grpc.aio.Server | None = None
        self.health_port = 0
        if settings.health_port is not None:
            self._health_server = grpc.aio.server(
                options=(
                    *SERVER_OPTIONS,
                    ("grpc.max_connection_idle_ms", PROBE_IDLE_MS),
                    ("grpc.server_handshake_timeout_ms", PROBE_IDLE_MS),
                    ("grpc.max_receive_message_length", MAX_PROBE_BYTES),
                    ("grpc.max_concurrent_streams", MAX_PROBES),
                    ("grpc.max_allowed_incoming_connections", MAX_PROBES),
                ),
                maximum_concurrent_rpcs=MAX_PROBES,
            )
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)

    @property
    def address(self) -> str:
        """``host:port`` to reach the server at."""
        return join_address(self.settings.host, self.port)

    @property
    def num_active_calls(self) -> int:
        """Calls in progress, health and reflection not counted."""
        return self._calls.num_active

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object, name: str) -> None:
        """Add a service before the start: its generated ``add_…_to_server``, its servicer and its full name."""
        add_to_server(servicer, self._server)
        self._streaming |= streaming_handlers(add_to_server, servicer)
        self._names.append(name)

    async def start(self) -> None:
        """Listen; :attr:`port` is then the bound port.

        Raises:
            InvalidRequest: the address cannot be listened on.
        """
        names = [*self._names, HEALTH_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        await self.set_serving(False)
        settings = self.settings
        if settings.port is not None:
            tls = settings.tls
            credentials = Certificates(tls).server_credentials() if tls else None
            self.port = _listen(self._server, settings.host, settings.port, "port", credentials)
        if settings.socket is not None:
            await self._listen_on_socket(settings.socket)
        if self._health_server is not None:
            self.health_port = _listen(self._health_server, settings.host, settings.health_port or 0, "health_port")
            await self._health_server.start()
        await self._server.start()

    async def _listen_on_socket(self, address: str) -> None:
        try:
            self._server.add_insecure_port(address)
            if (path := address.removeprefix("unix:")) != address:
                os.chmod(path, 0o600)
            if (framed := framed_path(address)) is not None and self._streaming:
                self._framed = FramedServer(
                    framed,
                    self._streaming,
                    self._calls.guard,
                    max_connections=cap_connections(self.settings.max_concurrent_rpcs + SPARE_CONNECTIONS),
                    max_message_bytes=self.settings.max_message_bytes,
                )
                await self._framed.start()
        except (RuntimeError, OSError) as error:
            raise InvalidRequest(
                f"cannot listen on {address}: the name is taken, too long or not allowed; choose another socket",
                param="socket",
            ) from error

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks whether calls are welcome."""
        state = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, state.SERVING if serving else state.NOT_SERVING)

    async def drain(self) -> bool:
        """Refuse new calls, turn health to NOT_SERVING, and give open calls ``drain_s`` seconds to end.

        True when they all did; the others are cancelled by :meth:`stop`.
        """
        self._calls.draining = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self._calls.wait_idle()
        except TimeoutError:
            logger.warning(
                "%d calls still open after %g s; cancelling them", self.num_active_calls, self.settings.drain_s
            )
            return False
        return True

    async def stop(self) -> None:
        """End what is left with UNAVAILABLE, wait for the handlers to clean up, and close the port."""
        await self._calls.evict()
        if self._framed is not None:
            await self._framed.stop()
        if self._health_server is not None:
            await self._health_server.stop(grace=None)
        await self._server.stop(grace=None)


def _listen(
    server: grpc.aio.Server, host: str, port: int, param: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """The bound port; without credentials it takes plain text."""
    check_port(host, port, param=param)  # gRPC would write a line of its own to stderr
    address = join_address(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InvalidRequest(
            f"cannot listen on {address}: the port is taken or the host is not this machine's; choose another port"
            " (0 takes a free one)",
            param=param,
        ) from error


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
