"""Who may use a port: certificates, and what a port beyond this machine needs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

from specdec.settings.option import require

SSL_CERTFILE: Final = "PEM file of the certificate (and chain) that clients see; it enables TLS"
SSL_KEYFILE: Final = "PEM file of its private key"
SSL_CA_CERTS: Final = "PEM file of CAs; clients must show a certificate that one of them signed"
INSECURE: Final = "listen beyond this machine without authentication"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side of TLS: its own certificate and key, and the CAs of the other side. All may be missing."""

    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None
    #: What stands before the names of the options, for messages.
    prefix: str = "ssl"

    def __post_init__(self) -> None:
        for name, other in (("certfile", "keyfile"), ("keyfile", "certfile")):
            require(
                getattr(self, name) is None or getattr(self, other) is not None,
                f"{self.prefix}_{other}",
                f"{self.prefix}_{name} is given without {self.prefix}_{other}; give both",
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are given."""
        return tuple(path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None)

    def __bool__(self) -> bool:
        return bool(self.paths)


def server_files(certfile: str | None, keyfile: str | None, ca_certs: str | None) -> TlsFiles:
    """The files of a server; empty: plain text.

    Raises:
        InvalidRequest: one is missing.
    """
    require(
        ca_certs is None or certfile is not None,
        "ssl_certfile",
        "ssl_ca_certs is given without ssl_certfile; clients can show certificates over TLS only",
    )
    return TlsFiles(certfile, keyfile, ca_certs)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only. Of names only localhost is known to be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_authentication(host: str, *, is_authenticated: bool, remedy: str) -> None:
    """Refuse to listen beyond this machine where anybody could use the port.

    Raises:
        InvalidRequest: ``host`` is no loopback address and nothing tells clients apart; ``remedy`` says what would.
    """
    require(
        is_authenticated or is_loopback(host),
        "host",
        f"host is {host!r}, which other machines can reach, and clients need neither key nor certificate; {remedy},"
        " listen on 127.0.0.1, or accept anybody with --insecure",
    )
