"""Where replicas are: listed one by one, behind a DNS name, or in a file. The last two may change at any time."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.backends.engines.address import check_engine, without_user
from specdec.errors import InvalidRequest, quote
from specdec.settings.engines import ENGINE_PREFIX, is_engine

logger = logging.getLogger(__name__)

DNS: Final = "dns:///"
FILE: Final = "file:"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server."""

    #: ``host:port``, a Unix domain socket, or the URL of an engine.
    address: str
    #: The name that its certificate must have; empty: the address's host.
    host_name: str = ""


class AddressSource(ABC):
    """What names servers."""

    #: Whether it always names the same ones.
    is_fixed = False

    @abstractmethod
    async def find(self) -> Sequence[Endpoint]:
        """The servers it names now.

        Raises:
            OSError: they cannot be found at the moment.
            InvalidRequest: what names them cannot be read.
        """


class Listed(AddressSource):
    """One server by its address."""

    is_fixed = True

    def __init__(self, address: str) -> None:
        self.endpoint = Endpoint(address)

    async def find(self) -> Sequence[Endpoint]:
        """That one."""
        return (self.endpoint,)


class DnsName(AddressSource):
    """Every address of a name, such as that of a headless service of Kubernetes: one server each.

    A name with addresses of both families stands for the same servers twice, so the family that comes first counts.
    """

    def __init__(self, host: str, port: int, prefix: str = "") -> None:
        """``prefix``: what stands before each ``host:port``."""
        self._host = host
        self._port = port
        self._prefix = prefix

    async def find(self) -> Sequence[Endpoint]:
        """Resolve the name."""
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        family = found[0][0]
        hosts = sorted({str(address[0]) for each, _, _, _, address in found if each == family})
        name = f"[{{}}]:{self._port}" if family == socket.AF_INET6 else f"{{}}:{self._port}"
        return [Endpoint(self._prefix + name.format(host), self._host) for host in hosts]


class AddressFile(AddressSource):
    """The addresses in a file, one a line; ``#`` begins a comment."""

    def __init__(self, path: Path, prefix: str = "") -> None:
        """``prefix``: what stands before each address."""
        self._path = path
        self._prefix = prefix

    async def find(self) -> Sequence[Endpoint]:
        """Read the file."""
        found = []
        for line in self._path.read_text().splitlines():
            if address := line.partition("#")[0].strip():
                found.append(self._endpoint_of(address))
        if not found:  # perhaps it is being written
            raise InvalidRequest(f"{self._path} names no server; write one address a line")
        return found

    def _endpoint_of(self, address: str) -> Endpoint:
        with suppress(InvalidRequest):  # it has the forms of the command line
            source = source_of(self._prefix + address.removeprefix(self._prefix))
            if isinstance(source, Listed) and is_engine(source.endpoint.address) == bool(self._prefix):
                return source.endpoint
        form = "http://host:port without a user name" if self._prefix else "host:port"
        raise InvalidRequest(f"{self._path} holds {quote(without_user(address))}; write each address as {form}")


def source_of(text: str) -> AddressSource:
    """What an address given on the command line stands for.

    Raises:
        InvalidRequest: it is none of the forms that are known here.
    """
    prefix = ENGINE_PREFIX if is_engine(text) else ""
    address = text.removeprefix(prefix)
    if address.startswith(FILE) and len(address) > len(FILE):
        return AddressFile(Path(address.removeprefix(FILE)), prefix)
    if prefix and not address.startswith(DNS):
        check_engine(text)
        return Listed(text)
    if text.startswith(("unix:/", "unix-abstract:")):
        return Listed(text)
    host, _, port = address.removeprefix(DNS).rpartition(":")
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    if not host or not port.isdecimal() or int(port) > 65535 or "/" in host or is_bare_ipv6:
        raise InvalidRequest(
            f"{quote(text)} is no address; write host:port, [IPv6]:port, unix:/path, unix-abstract:name,"
            " dns:///host:port or file:path"
        )
    if address.startswith(DNS):
        return DnsName(host, int(port), f"{prefix}http://" if prefix else "")
    return Listed(text)


class Discovery:
    """All servers of one role."""

    def __init__(self, given: Iterable[str]) -> None:
        """``given``: see :func:`source_of`, which says what is raised."""
        self._found: dict[AddressSource, Sequence[Endpoint]] = {
            source: (source.endpoint,) if isinstance(source, Listed) else () for source in map(source_of, given)
        }
        self._failed: set[AddressSource] = set()

    @property
    def is_fixed(self) -> bool:
        """Whether the servers are always the same."""
        return all(source.is_fixed for source in self._found)

    @property
    def endpoints(self) -> list[Endpoint]:
        """The servers found last, each once."""
        by_address = {each.address: each for found in self._found.values() for each in found}
        return list(by_address.values())

    async def update(self) -> None:
        """Find the servers again. A source that fails still stands for the servers found there last."""
        for source in self._found:
            try:
                self._found[source] = await source.find()
            except (OSError, InvalidRequest, UnicodeError) as error:
                if source not in self._failed:
                    logger.warning("the replicas stay as they are: %s", error)
                self._failed.add(source)
            else:
                self._failed.discard(source)
