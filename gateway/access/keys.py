"""API keys: given in plain text, or in a file of hashes that may change at any time."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gateway.access.caller import Caller
from specdec.errors import InvalidRequest, Unauthenticated
from specdec.settings import AccessSettings, ClientLimits
from specdec.settings.option import options_of, require

logger = logging.getLogger(__name__)

#: Seconds between two checks of whether the file has changed.
CHECK_INTERVAL_S: Final = 1.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SCHEME: Final = "bearer "


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that is known here. Keys are random and long, so a plain SHA-256 of one tells nothing of it."""

    name: str
    digest: bytes
    limits: ClientLimits


def digest_of(key: str) -> bytes:
    """The hash of a key, 32 bytes."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class KeyRing:
    """All keys of a gateway, those of the file as it is now."""

    def __init__(self, settings: AccessSettings) -> None:
        """Raises :class:`InvalidRequest` where the file cannot be read."""
        self._settings = settings
        self._limits = ClientLimits(**{name: getattr(settings, name) for name in options_of(ClientLimits)})
        self._given = [
            ApiKey(f"key-{digest.hex()[:8]}", digest, self._limits) for digest in map(digest_of, settings.api_key)
        ]
        self._path = None if settings.api_key_file is None else Path(settings.api_key_file)
        self._version: object = None
        self._check_at = 0.0
        self._read: Sequence[ApiKey] = ()
        #: Why the file as it is now cannot be used; empty: it is in use.
        self.problem = ""
        if self._path is not None:
            self._version = _version_of(self._path)
            self._read = read_keys(self._path, self._limits)

    def caller(self, authorization: str | None, peer: str) -> Caller:
        """Who sent this ``Authorization`` header from the address ``peer``.

        Raises:
            Unauthenticated: a key is asked for and this is none.
        """
        if not self._settings.asks_for_key:
            return Caller(client=peer, limits=self._limits)
        self._renew()
        if authorization is None:
            raise Unauthenticated("no API key was sent; send the header Authorization: Bearer KEY")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("the header Authorization has no bearer token; send Authorization: Bearer KEY")
        key = _find((*self._given, *self._read), digest_of(authorization[len(_SCHEME) :].strip()))
        if key is None:
            raise Unauthenticated("this API key is not known here; ask the operator of the server for one")
        return Caller(key=key.name, client=key.name, limits=key.limits)

    def _renew(self) -> None:
        """Read the file again where it has changed. A file that cannot be read leaves the keys as they are, so that a
        mistake locks nobody out, and is tried again.
        """
        if self._path is None or (now := time.monotonic()) < self._check_at:
            return
        self._check_at = now + CHECK_INTERVAL_S
        version = _version_of(self._path)
        if version == self._version and not self.problem:
            return
        self._version = version
        try:
            self._read = read_keys(self._path, self._limits)
        except InvalidRequest as error:
            if str(error) != self.problem:
                logger.error("the keys stay as they are: %s", error)
            self.problem = str(error)
        else:
            self.problem = ""
            logger.info("read %d keys from %s", len(self._read), self._path)


def _find(keys: Iterable[ApiKey], digest: bytes) -> ApiKey | None:
    """The key with this hash. Every key is compared, in constant time, so the time tells nothing."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_keys(path: Path, limits: ClientLimits) -> list[ApiKey]:
    """The keys of a file: a JSON object a line, such as ``{"name": "alice", "sha256": "…"}``, with limits of its own
    or those given here. Empty lines and lines that begin with # are skipped.

    Raises:
        InvalidRequest: the file or a line of it cannot be read; the message names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"cannot read api_key_file {path}: {getattr(error, 'strerror', None) or error}", param="api_key_file"
        ) from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _read_key(line, limits)
            require(key.name not in keys, "name", f"the name {key.name!r} stands there twice; give each key its own")
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}, line {number}: {error}", param="api_key_file") from None
        keys[key.name] = key
    return list(keys.values())


def check_key_name(name: object) -> None:
    """Raise :class:`InvalidRequest` for what cannot be the name of a key."""
    require(
        isinstance(name, str) and _NAME.fullmatch(name) is not None,
        "name",
        f"name is {name!r}; use 1 to 64 letters, digits, dots, hyphens and underscores",
    )


def _read_key(line: str, limits: ClientLimits) -> ApiKey:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    require(isinstance(fields, dict), "name", "it is no JSON object; make a line with: tandem key NAME")
    name, digest = fields.pop("name", None), fields.pop("sha256", None)
    check_key_name(name)
    require(
        isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None,
        "sha256",
        "sha256 is not the SHA-256 of a key, 64 hexadecimal digits in lower case; make a line with: tandem key NAME",
    )
    known = options_of(ClientLimits)
    for field in fields:
        require(field in known, field, f"{field!r} is unknown; a key has name, sha256, {', '.join(known)}")
    return ApiKey(name, bytes.fromhex(digest), replace(limits, **fields))


def _version_of(path: Path) -> object:
    """What changes whenever the file does; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
