"""The bytes of a framed call.

A frame is the size of its content (uint32, little endian), its kind (uint8) and its content. The client sends HEADERS
once, then MESSAGEs. The server sends MESSAGEs, then STATUS once. HEADERS and STATUS are JSON. The client closes the
connection, to end the call or after STATUS. If the server did, a client that writes would lose what it has not read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from specdec.errors import InvalidRequest

_PREFIX: Final = struct.Struct("<IB")
#: Bytes of HEADERS and of STATUS at most.
MAX_HEADER_BYTES: Final = 64 * 1024

Metadata = Sequence[tuple[str, str]]


class FrameKind(IntEnum):
    """What a frame holds."""

    HEADERS = 1
    MESSAGE = 2
    STATUS = 3


def encode_frame(kind: FrameKind, content: bytes) -> bytes:
    """The bytes of a frame."""
    return _PREFIX.pack(len(content), kind) + content


def encode_json(kind: FrameKind, **fields: Any) -> bytes:
    """The bytes of HEADERS or STATUS."""
    return encode_frame(kind, json.dumps(fields).encode())


class FrameParser:
    """Cuts what arrives into frames. What is missing of a frame is waited for."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameKind, bytes]]:
        """The frames that are whole with ``data``.

        Raises:
            InvalidRequest: a frame is larger than its kind may be, or of an unknown kind.
        """
        self._rest += data
        frames, begin = [], 0
        with memoryview(self._rest) as rest:
            while len(rest) - begin >= _PREFIX.size:
                size, number = _PREFIX.unpack_from(rest, begin)
                kind = self._kind_of(number, size)
                end = begin + _PREFIX.size + size
                if end > len(rest):
                    break
                frames.append((kind, bytes(rest[begin + _PREFIX.size : end])))
                begin = end
        del self._rest[:begin]
        return frames

    def _kind_of(self, number: int, size: int) -> FrameKind:
        try:
            kind = FrameKind(number)
        except ValueError:
            raise InvalidRequest(f"a frame of the unknown kind {number} came; use one version of Tandem") from None
        limit = self._max_message_bytes if kind is FrameKind.MESSAGE else MAX_HEADER_BYTES
        if size > limit:
            raise InvalidRequest(f"a {kind.name} of {size} bytes is above the limit of {limit}; send less")
        return kind
