"""Where the framed socket of a gRPC server is."""

from __future__ import annotations

import os
from typing import Final

#: What the socket's name adds to that of the gRPC socket.
SUFFIX: Final = ".framed"
#: Bytes of a socket's path at most; Linux allows four more than other systems.
MAX_PATH_BYTES: Final = 103


def framed_path(address: str) -> str | None:
    """The path of the framed socket beside the gRPC socket ``unix:/path``; None at other kinds of addresses and where
    it would be too long.
    """
    if not address.startswith("unix:/"):
        return None
    path = address.removeprefix("unix:") + SUFFIX
    return path if len(os.fsencode(path)) <= MAX_PATH_BYTES else None
