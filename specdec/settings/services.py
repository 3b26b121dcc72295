"""Settings of the target service, the draft service and their gRPC server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdec.process.logs import FORMATS, LEVELS
from specdec.rules import DEFAULT_RULE, Rule
from specdec.settings.listening import (
    INSECURE,
    SSL_CA_CERTS,
    SSL_CERTFILE,
    SSL_KEYFILE,
    TlsFiles,
    require_authentication,
    server_files,
)
from specdec.settings.model import ModelSettings, SchedulerSettings
from specdec.settings.option import check_options, option, require
from specdec.settings.speculative import SpeculativeSettings
from specdec.settings.traces import ENDPOINT, VARIABLES, check_endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """A target service."""

    GROUPS: ClassVar = {"speculation": "verification"}

    model: ModelSettings
    scheduler: SchedulerSettings = SchedulerSettings()
    verification: Rule = option(DEFAULT_RULE, "rule for sessions that name none")
    hidden_state_maps: tuple[str, ...] = option((), "folders of draft heads whose first layer runs here")
    max_state_map_bytes: int = option(2**30, "bytes of such layers that drafts may send; 0 takes none", ge=0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """A draft service. ``model`` is None for drafters without a model."""

    GROUPS: ClassVar = {"speculation": "target_model"}

    speculative: SpeculativeSettings
    model: ModelSettings | None = None
    target_model: str | None = option(None, "folder of the target's checkpoint; heads use some of its tensors")
    scheduler: SchedulerSettings = SchedulerSettings()

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.target_model is not None or not self.speculative.reads_target,
            "target_model",
            f"a head ({', '.join(self.speculative.methods)}) uses tensors of the target: give target_model, the folder"
            " of the target's checkpoint",
        )
        require(
            self.model is None or self.model.tensor_parallel_size == 1,
            "tensor_parallel_size",
            f"tensor_parallel_size is {self.model and self.model.tensor_parallel_size}: only a target is split over"
            " processes; use 1 for a draft",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a gRPC server listens and how it stops."""

    GROUPS: ClassVar = {"server": "host", "log": "log_level", "connections": "max_connections"}

    host: str = option("127.0.0.1", "address to listen on")
    port: int | None = option(
        None, "port to listen on; 0 takes a free one, which is the default unless a socket is given", ge=0, le=65535
    )
    socket: str | None = option(None, "Unix domain socket to listen on: unix:/path or unix-abstract:name")
    health_port: int | None = option(
        None, "port for gRPC health checks alone, in plain text, such as those of Kubernetes", ge=0, le=65535
    )
    ssl_certfile: str | None = option(None, SSL_CERTFILE)
    ssl_keyfile: str | None = option(None, SSL_KEYFILE)
    ssl_ca_certs: str | None = option(None, SSL_CA_CERTS)
    insecure: bool = option(False, INSECURE)
    drain_s: float = option(20.0, "seconds open streams get to finish after SIGTERM", ge=0)
    log_level: str = option("info", "least severe messages in the log", choices=LEVELS)
    log_format: str = option("text", "lines of the log on stderr", choices=FORMATS)
    otlp_traces_endpoint: str | None = option(None, ENDPOINT, env=VARIABLES)
    max_connections: int = option(4096, "gRPC connections at once; one more is refused", ge=1)
    max_message_bytes: int = option(64 * 2**20, "bytes of a message", ge=1, flag=False)
    max_receiving: int | None = option(None, "calls whose first message is received at once", ge=1, flag=False)
    max_concurrent_rpcs: int = option(
        1024, "streams and calls at once, also those of the framed socket; one more gets RESOURCE_EXHAUSTED", ge=1
    )
    first_message_timeout_s: float = option(10.0, "seconds a call may take to send its first message", gt=0)
    write_timeout_s: float = option(30.0, "seconds a client may take to read a message before its call ends", gt=0)

    def __post_init__(self) -> None:
        check_options(self)
        check_endpoint(self.otlp_traces_endpoint)
        require(
            self.socket is None or self.socket.startswith(("unix:/", "unix-abstract:")),
            "socket",
            f"socket is {self.socket!r}; write unix:/path or unix-abstract:name",
        )
        if self.port is None and self.socket is None:
            object.__setattr__(self, "port", 0)
        require_authentication(
            self.host,
            is_authenticated=self.port is None or self.tls.ca_certs is not None or self.insecure,
            remedy="give --ssl-certfile, --ssl-keyfile and --ssl-ca-certs (tandem certs makes them)",
        )

    @property
    def tls(self) -> TlsFiles:
        """The certificates of the port; empty: plain text. The socket is protected by its permissions instead."""
        return server_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
