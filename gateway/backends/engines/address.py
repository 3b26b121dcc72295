"""Addresses of engines: ``openai+http://host:port`` or ``openai+https://host:port``, with a path where there is one."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from specdec.errors import InvalidRequest, quote

_PREFIX: Final = "openai+"


def check_engine(address: str) -> None:
    """Refuse what is no URL of a server.

    Raises:
        InvalidRequest: it has no host, a port that is none, a user name, a query or a fragment.
    """
    try:
        parts = urlsplit(address)
        is_url = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidRequest(
            f"{quote(_without_user(address))} is no URL of an engine; write openai+http://host:port or"
            " openai+https://host:port, and its key with --target-api-key-file"
        )


def url_of(address: str) -> str:
    """The URL below which the engine has its paths, without ``/v1``."""
    return address.removeprefix(_PREFIX).rstrip("/").removesuffix("/v1")


def _without_user(address: str) -> str:
    """An address without what stands before ``@``, which is a secret."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
