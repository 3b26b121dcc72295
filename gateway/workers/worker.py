"""The program of a worker: calls the functions it is sent, one after another, until the gateway is gone."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from typing import Any, Final

from gateway.workers.connection import Closed, receive, send
from specdec.errors import InvalidRequest

#: Others come first: a worker takes what a busy machine leaves, about a tenth of a core at least.
NICENESS: Final = 10
#: Bytes of data of a worker above those it starts with; work that needs more is refused.
MAX_DATA_BYTES: Final = 2**30
#: A worker that has grown by more than this ends after its answer, and so gives its memory back.
MAX_GROWTH_BYTES: Final = 32 * 2**20

TOO_LARGE: Final = "reading the request takes too much memory; send a smaller one"


def main() -> None:
    """Serve the socket that is the standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    connection = socket.socket(fileno=0)
    try:
        (make, arguments), _ = receive(connection)
        state = make(*arguments)
        _limit_memory()
        most = _resident_bytes() + MAX_GROWTH_BYTES
        while _resident_bytes() < most:
            (function, arguments), raw = receive(connection)
            send(connection, _call(function, state, raw, arguments))
            del raw, arguments
    except Closed:
        return


def _call(function: Any, state: Any, raw: bytes, arguments: Any) -> tuple[Any, Exception | None]:
    try:
        return function(state, raw, *arguments), None
    except MemoryError:
        return None, InvalidRequest(TOO_LARGE)
    except Exception as error:
        return None, error.with_traceback(None)


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere there is no such limit
        most = _memory("VmData") + MAX_DATA_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _resident_bytes() -> int:
    if sys.platform == "linux":
        return _memory("VmRSS")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the peak, in bytes, on macOS


def _memory(name: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
