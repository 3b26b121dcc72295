"""Settings of how many connections and requests there are, and how long the gateway waits for their clients."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import ClassVar

from specdec.settings.access import AccessSettings
from specdec.settings.option import option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings(AccessSettings):
    """How many connections there are, and how long the gateway waits for clients."""

    GROUPS: ClassVar = {"connections": "max_connections"}

    max_connections: int = option(
        4096,
        "HTTP connections at once; one more closes the one whose client keeps the gateway waiting longest",
        ge=1,
    )
    max_client_connections: int = option(1024, "the same of one address; more for a proxy in front", ge=1)
    forwarded_allow_ips: tuple[str, ...] = option(
        (), "proxies whose X-Forwarded-For names the client: addresses, networks, or *"
    )
    header_timeout_s: float = option(10.0, "seconds for a request's line and headers", gt=0)
    body_timeout_s: float = option(30.0, "seconds for a body, or for the message of a gRPC call", gt=0)
    write_timeout_s: float = option(30.0, "seconds a client may read nothing before its request ends", gt=0)
    keep_alive_s: float = option(30.0, "seconds an idle HTTP connection is kept", gt=0)

    def __post_init__(self) -> None:
        AccessSettings.__post_init__(self)
        for proxy in self.forwarded_allow_ips:
            require(
                proxy == "*" or _is_network(proxy),
                "forwarded_allow_ips",
                f"forwarded_allow_ips holds {proxy!r}; write each as an IP address, a network such as 10.0.0.0/8, or *",
            )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
