"""Processes forked from one that has imported what services need: they start in a moment, as ``python -m`` does not."""

from __future__ import annotations

import asyncio
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

import pytest


class ForkedProcess:
    """``python -m MODULE ARGUMENT…``, with what :class:`subprocess.Popen` has of it."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        in_own_session: bool = False,
    ) -> None:
        """Output and errors go to ``stdout``, a stream of text."""
        reading, writing = os.pipe()
        self.stdout: IO[str] = open(reading, encoding="utf-8")  # noqa: SIM115 (its reader closes it)
        output = _Output(writing)
        self._process = _context().Process(
            target=_run, args=(output, module, arguments, dict(environment), folder, in_own_session)
        )
        self._process.start()
        os.close(writing)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that can be read once the process has ended."""
        return self._process.sentinel

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


class ForkedChild:
    """In place of :class:`asyncio.subprocess.Process`, with what a supervisor of services uses of it."""

    def __init__(self, process: ForkedProcess, stdout: asyncio.StreamReader, pipe: asyncio.ReadTransport) -> None:
        self.pid = process.pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._process, self._pipe = process, pipe
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._end)

    @classmethod
    async def start(cls, *command: str, env: Mapping[str, str], **_: object) -> ForkedChild:
        """In place of :func:`asyncio.create_subprocess_exec` for the command of a service."""
        _python, _unbuffered, _module, launcher, _pid, module, *arguments = command
        assert launcher == "tandem.launcher.child"
        process = ForkedProcess(module, arguments, env, Path.cwd(), in_own_session=True)
        stdout = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
        return cls(process, stdout, pipe)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self.returncode = self._process.poll()
        self._ended.set()

    async def wait(self) -> int:
        """The exit status, once all output is read."""
        await self._ended.wait()
        while not self._pipe.is_closing():  # noqa: ASYNC110 (a transport has no event)
            await asyncio.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()


@pytest.fixture
def forked_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services that a supervisor of this process starts are forks."""
    monkeypatch.setattr(asyncio, "create_subprocess_exec", ForkedChild.start)


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
    context.set_forkserver_preload(["tests.e2e.preloaded"])
    return context


def _run(  # noqa: PLR0917
    output: _Output,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    in_own_session: bool,
) -> None:
    """What the forked process does."""
    if in_own_session:
        os.setsid()
    os.dup2(output.descriptor, 1)
    os.dup2(output.descriptor, 2)
    os.close(output.descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
