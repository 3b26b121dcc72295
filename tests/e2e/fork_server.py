"""Processes forked from one that has imported what services need: they start in a moment, as ``python -m`` does not."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

#: What takes seconds to import. None of it starts threads, which a fork would lose.
PRELOADED = (
    "target_service.core",
    "draft_service.core",
    "draft_service.servicer",
    "target_service.servicer",
    "engine.loading.load",
    "transformers.models.llama.modeling_llama",
    "specdec.rpc.core_service",
    "gateway.app",
    "gateway.backends.target",
    "gateway.backends.draft",
)


class ForkedProcess:
    """``python -m MODULE ARGUMENT…``, with what :class:`subprocess.Popen` has of it."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Output and errors go to ``stdout``, a stream of text."""
        reading, writing = os.pipe()
        self.stdout: IO[str] = open(reading, encoding="utf-8")  # noqa: SIM115 (its reader closes it)
        output = _Output(writing)
        self._process = _context().Process(target=_run, args=(output, module, arguments, dict(environment), folder))
        self._process.start()
        os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status, or the signal as a negative number; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status.

        Raises:
            subprocess.TimeoutExpired: it runs for longer.
        """
        self._process.join(timeout_s)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()


class _Output:
    """A file descriptor that travels to the forked process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> Any:
        return DupFd(self.descriptor)

    def __setstate__(self, sent: Any) -> None:
        self.descriptor = sent.detach()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _run(output: _Output, module: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """What the forked process does."""
    os.dup2(output.descriptor, 1)
    os.dup2(output.descriptor, 2)
    os.close(output.descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
