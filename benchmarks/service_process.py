"""A service in a process of its own, for benchmarks that need several of one kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdec.errors import Unavailable


@dataclass(frozen=True, slots=True)
class StartedService:
    """A process that is ready."""

    pid: int
    #: Its ready line.
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        """``host:port`` of its main port."""
        return f"127.0.0.1:{self.ready['port']}"

    @property
    def grpc_address(self) -> str:
        """``host:port`` of a gateway's gRPC API."""
        return f"127.0.0.1:{self.ready['grpc_port']}"


@contextmanager
def service(module: str, *arguments: str) -> Iterator[StartedService]:
    """``python -m module arguments…`` from its ready line until the end of the block.

    Raises:
        Unavailable: it ended before it was ready.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith('{"event": "ready"'):
                    yield StartedService(process.pid, json.loads(line))
                    return
            raise Unavailable(f"{module} ended before it was ready; try: {' '.join(command)}")
        finally:
            process.terminate()
