"""One worker process: started where there is none, and again once it has ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from gateway.workers.connection import receive, send
from gateway.workers.worker import WorkerLimits


class TooSlow(Exception):
    """A call took more CPU time than the limits allow; the process was ended."""


class WorkerProcess:
    """Calls functions in a process. :meth:`call` blocks; :meth:`kill` may come from another thread."""

    def __init__(self, limits: WorkerLimits, make: Callable[..., Any], *arguments: Any) -> None:
        """The process calls ``make(*arguments)`` once, and functions get the result. Everything must be picklable."""
        self._make = (limits, make, arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_killed = False

    def call(self, function: Callable[..., Any], raw: bytes, *arguments: Any) -> tuple[Any, Exception | None]:
        """The result of ``function(state, raw, *arguments)``, or its error.

        Raises:
            Closed: the process had ended, or ended meanwhile.
            TooSlow: it took too much CPU time.
            RuntimeError: it was killed, for good.
        """
        if self._is_killed:
            raise RuntimeError("a worker is called after shutdown")
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            send(self._connection, (function, arguments), raw)
            (result, error), _ = receive(self._connection)
        except BaseException as failure:
            if self.end() == -signal.SIGPROF:
                raise TooSlow from failure
            raise
        return result, error

    def kill(self) -> None:
        """End the process now, or as soon as it has started; it is not needed any more."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway.workers.worker"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        self._connection = ours
        if self._is_killed:
            self._process.kill()
        send(ours, self._make)

    def end(self) -> int | None:
        """End the process, if there is one, and forget it; how it ended."""
        status = None
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            status = self._process.wait()
        self._connection = self._process = None
        return status
