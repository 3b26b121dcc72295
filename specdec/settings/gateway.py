"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdec.methods import LOOKUP_METHODS
from specdec.process.logs import FORMATS, LEVELS
from specdec.rules import Rule
from specdec.settings.engines import TARGET_API_KEY_VARIABLE, check_engines, is_engine
from specdec.settings.limits import RequestLimits
from specdec.settings.listening import (
    INSECURE,
    SSL_CA_CERTS,
    SSL_CERTFILE,
    SSL_KEYFILE,
    TlsFiles,
    is_loopback,
    require_authentication,
    server_files,
)
from specdec.settings.lookup import LookupSettings
from specdec.settings.option import option, require
from specdec.settings.traces import ENDPOINT, VARIABLES, check_endpoint
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(RequestLimits):
    """The gateway."""

    GROUPS: ClassVar = {
        "services": "targets",
        "server": "host",
        "model": "served_model_name",
        "speculation": "num_speculative_tokens",
        "requests": "request_timeout_s",
        "log": "log_level",
    }

    targets: tuple[str, ...] = option(
        (),
        "target replicas: host:port, unix:/path, dns:///host:port (each of its addresses), file:path (one a line); or"
        " engines: openai+http://host:port, openai+dns:///host:port, openai+file:path",
    )
    drafts: tuple[str, ...] = option((), "draft replicas; without one only lookups draft")
    lookup: tuple[str, ...] = option((), "lookups that draft in the gateway, best first", choices=LOOKUP_METHODS)
    lookup_settings: LookupSettings = LookupSettings()
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port of the REST API; 0 takes a free one", ge=0, le=65535)
    grpc_port: int = option(50051, "port of the gRPC API; 0 takes a free one", ge=0, le=65535)
    ssl_certfile: str | None = option(None, SSL_CERTFILE)
    ssl_keyfile: str | None = option(None, SSL_KEYFILE)
    ssl_ca_certs: str | None = option(None, SSL_CA_CERTS)
    insecure: bool = option(False, INSECURE)
    published_host: str | None = option(None, "address a container publishes the ports on: counts in place of host")
    backend_ssl_certfile: str | None = option(None, "PEM file of the certificate for targets and drafts")
    backend_ssl_keyfile: str | None = option(None, "PEM file of its private key")
    backend_ssl_ca_certs: str | None = option(None, "PEM file of the CAs of targets and drafts: speaks TLS to them")
    target_api_key: str | None = option(None, "key shown to engines as a bearer token", env=TARGET_API_KEY_VARIABLE)
    target_api_key_file: str | None = option(None, "file that holds it, in place of the flag")
    served_model_name: tuple[str, ...] = option((), "names the model answers to; by default the target's own")
    tokenizer: str | None = option(None, "folder of the tokenizer; without one only token ids are served")
    chat_template: str | None = option(None, "Jinja text, or a file with it, in place of the tokenizer's chat template")
    response_template: str | None = option(
        None, "JSON file that tells how answers are read, in place of the tokenizer's or the model family's"
    )
    num_speculative_tokens: int = option(
        4, "drafted tokens a round at most; 0: no speculation", ge=0, le=MAX_SPECULATIVE_TOKENS
    )
    # The next two are for a draft with cores or a device of its own.
    disable_by_batch_size: int | None = option(None, "no drafting while more sequences than this are open", ge=1)
    fixed_draft_length: bool = option(False, "draft the maximum in every round, whether or not it pays off")
    verification: Rule | None = option(None, "rule of requests that name none; default: block, coupled with a seed")
    untrusted_drafts: bool = option(False, "believe no q of a draft: requests for token or block use coupled")
    seed: int | None = option(None, "makes the seeds of requests that give none reproducible")
    request_timeout_s: float | None = option(1800.0, "seconds a request may take; a client may ask for fewer", gt=0)
    draft_timeout_s: float = option(1.0, "seconds a draft gets before the round continues without it", gt=0)
    max_target_retries: int = option(3, "times a session is reopened on a target before its request fails", ge=0)
    target_wait_s: float = option(60.0, "seconds a request whose target was lost waits for one to return", ge=0)
    max_concurrent_sequences: int = option(512, "sequences in progress, n samples are n; more wait", ge=1)
    max_queued_requests: int = option(512, "requests that wait for that, fair by client; one more gets 429", ge=0)
    max_queue_wait_s: float = option(30.0, "seconds a request waits before it gets 429", gt=0)
    max_stored_response_bytes: int = option(64 * 2**20, "bytes of all responses kept for previous_response_id", ge=0)
    drain_s: float = option(20.0, "seconds open requests get to finish after SIGTERM", ge=0)
    disable_playground: bool = option(False, "no page at /, only the API")
    log_level: str = option("info", "least severe messages in the log", choices=LEVELS)
    log_format: str = option("text", "lines of the log on stderr", choices=FORMATS)
    log_requests: bool = option(False, "log each request as it ends or is refused; prompts and texts are left out")
    otlp_traces_endpoint: str | None = option(None, ENDPOINT, env=VARIABLES)

    def __post_init__(self) -> None:
        RequestLimits.__post_init__(self)
        check_endpoint(self.otlp_traces_endpoint)
        require(
            all(name.strip() for name in self.served_model_name),
            "served_model_name",
            f"served_model_name is {', '.join(map(repr, self.served_model_name))}; leave it out for the model's own"
            " name, or give names that are not empty",
        )
        require_authentication(
            self.published_host or self.host,
            is_authenticated=self.asks_for_key or self.tls.ca_certs is not None or self.insecure,
            remedy="give --api-key, --api-key-file (tandem key makes keys) or --ssl-ca-certs (client certificates)",
        )
        require(
            self.backend_tls.ca_certs is not None or not self.backend_tls,
            "backend_ssl_ca_certs",
            "backend_ssl_certfile is given without backend_ssl_ca_certs; targets and drafts are asked over TLS only"
            " with the CAs that signed their certificates",
        )
        engines = [address for address in self.drafts if is_engine(address)]
        require(
            not engines,
            "drafts",
            f"drafts holds {', '.join(engines)}, and engines draft for themselves only; give draft services",
        )
        if self.has_engines:
            check_engines(self)

    @property
    def has_engines(self) -> bool:
        """Whether the targets are other engines, not Tandem's own."""
        return any(map(is_engine, self.targets))

    @property
    def checks_hosts(self) -> bool:
        """Whether ``Host`` and ``Origin`` must be this server's: where it has names, or asks nobody of this machine for
        a key or certificate.
        """
        is_open = not self.asks_for_key and self.tls.ca_certs is None
        return bool(self.allowed_hosts) or (is_open and is_loopback(self.published_host or self.host))

    @property
    def tls(self) -> TlsFiles:
        """The certificates of both ports; empty: plain text."""
        return server_files(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @property
    def backend_tls(self) -> TlsFiles:
        """The certificates for calls to targets and drafts; empty: plain text."""
        return TlsFiles(
            self.backend_ssl_certfile, self.backend_ssl_keyfile, self.backend_ssl_ca_certs, prefix="backend_ssl"
        )
