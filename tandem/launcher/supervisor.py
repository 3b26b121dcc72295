"""Run services as processes of this machine: start, watch, restart, stop.

A child that dies before it was ever ready is a failed start; one that dies later is restarted, at once and then with
growing pauses while it keeps dying. Children run in sessions of their own, so Ctrl-C reaches only the launcher, which
stops them in order; should the launcher be killed, the kernel kills them (:mod:`tandem.launcher.child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from specdec.errors import InvalidRequest, Unavailable
from specdec.process.logs import json_line

#: Exit code of a service whose flags cannot be used.
_WRONG_CALL: Final = 2
#: Seconds between two questions whether a starting service is ready.
_POLL_S: Final = 0.1
#: Pause before the second restart in a row; each further one doubles it up to the limit. The first has none.
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
#: Restarts of a service that ran this long are no longer in a row.
_SETTLED_S: Final = 60.0
#: Seconds from SIGTERM to SIGKILL for a service nobody uses any more.
_QUIET_STOP_S: Final = 10.0
#: Seconds after which services that still load are named again.
_PROGRESS_S: Final = 10.0

Log = Callable[[str, str], None]


def log_to_stderr(name: str, line: str) -> None:
    """Write one line of a service's log."""
    sys.stderr.write(f"[{name}] {line}\n")
    sys.stderr.flush()


def log_json_to_stderr(name: str, line: str) -> None:
    """Write one line of a service's log as JSON that names the service."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        line = json.dumps({**fields, "service": name}, ensure_ascii=False)
    else:
        line = json_line(line, service=name)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One process to run."""

    name: str
    #: Python module and its arguments.
    module: str
    arguments: tuple[str, ...] = ()
    #: Added to this process's environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: "host:port" or "unix:/path" it listens on.
    address: str = ""
    #: Whether it answers as ready; None waits for the line ``{"event": "ready", …}`` that our services print.
    is_ready: Callable[[], Awaitable[bool]] | None = None


class Child:
    """One service and the process that runs it at the moment."""

    def __init__(self, service: ServiceSpec, log: Log) -> None:
        self.service = service
        self.ready = asyncio.Event()
        self.num_restarts = 0
        self._log = log
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=20)

    @property
    def pid(self) -> int | None:
        """Process id, or None while no process runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def run(self) -> None:
        """Start the process and keep it running until :meth:`stop`.

        Raises :class:`Unavailable` if it ends before it was ever ready, :class:`InvalidRequest` if its flags are why.
        """
        pause_s = 0.0
        while not self._stopping:
            started = time.monotonic()
            code = await self._run_once()
            if self._stopping:
                return
            if not self.ready.is_set() and not self.num_restarts:
                error = InvalidRequest if code == _WRONG_CALL else Unavailable
                raise error(f"{self.service.name} {_describe_exit(code)} before it was ready{self._last_words()}")
            self.ready.clear()
            if time.monotonic() - started > _SETTLED_S:
                pause_s = 0.0
            self.num_restarts += 1
            when = f" in {pause_s:g} s" if pause_s else ""
            self._log("tandem", f"{self.service.name} {_describe_exit(code)}; starting it again{when}")
            await asyncio.sleep(pause_s)
            pause_s = max(_FIRST_PAUSE_S, min(2 * pause_s, _LONGEST_PAUSE_S))

    async def stop(self, within_s: float) -> None:
        """SIGTERM, then SIGKILL to the whole process group once the time is over."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), within_s)
        except TimeoutError:
            self._log("tandem", f"{self.service.name} did not stop within {within_s:.1f} s; killing it")
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL to the process group, and wait for the end."""
        self._stopping = True
        if (pid := self.pid) is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            await self._process.wait()

    async def _run_once(self) -> int:
        service = self.service
        self._process = process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-u",
                "-m",
                "tandem.launcher.child",
                str(os.getpid()),
                service.module,
                *service.arguments,
            ),
            env={**os.environ, **service.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        reader = asyncio.create_task(self._forward_log(process))
        watcher = asyncio.create_task(self._watch(restarted=self.num_restarts > 0))
        try:
            code = await process.wait()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(reader), 1.0)
            return code
        finally:
            for task in (watcher, reader):
                task.cancel()
            await asyncio.gather(watcher, reader, return_exceptions=True)

    async def _watch(self, *, restarted: bool) -> None:
        if self.service.is_ready is None:
            await self.ready.wait()
        else:
            while not await self.service.is_ready():  # noqa: ASYNC110 (asks another process)
                await asyncio.sleep(_POLL_S)
            self.ready.set()
        if restarted:
            self._log("tandem", f"{self.service.name} is back")

    async def _forward_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._take_line(line)
        if rest:
            self._take_line(rest)

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text.startswith('{"event": "ready"'):
            if self.service.is_ready is None:
                self.ready.set()
        elif text:
            self._last_lines.append(text)
            self._log(self.service.name, text)

    def _last_words(self) -> str:
        return f": {self._last_lines[-1]}" if self._last_lines else ""


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"


class Supervisor:
    """Services that run together. As an async context manager it starts them and stops them in reverse order."""

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        drain_s: float,
        startup_timeout_s: float = 600.0,
        log: Log = log_to_stderr,
    ) -> None:
        self.children = {service.name: Child(service, log) for service in services}
        self._log = log
        self._drain_s = drain_s
        self._startup_timeout_s = startup_timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every service and return once all are ready.

        Raises :class:`Unavailable` when one ends, or is still not ready after the startup timeout.
        """
        self._tasks = [asyncio.create_task(child.run()) for child in self.children.values()]
        all_ready = asyncio.create_task(self._wait_ready())
        try:
            waited: set[asyncio.Future[Any]] = {all_ready, *self._tasks}
            await asyncio.wait(waited, timeout=self._startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()
            if not all_ready.done():
                late = ", ".join(name for name, child in self.children.items() if not child.ready.is_set())
                raise Unavailable(f"not ready after {self._startup_timeout_s:g} s: {late}")
        finally:
            all_ready.cancel()
            await asyncio.gather(all_ready, return_exceptions=True)

    async def _wait_ready(self) -> None:
        """Return once every service is ready; the log tells which are."""
        started = time.monotonic()
        waits = {asyncio.create_task(child.ready.wait()): name for name, child in self.children.items()}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, timeout=_PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                ready = [waits.pop(wait) for wait in done]
                news = [f"{name} is ready after {time.monotonic() - started:.1f} s" for name in ready]
                rest = [f"waiting for {', '.join(waits.values())}"] if waits else []
                self._log("tandem", "; ".join([*news, *rest]))
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop the services in reverse order: the last one started drains first, while the others still serve it.

        All together take no longer than the drain time and a few seconds.
        """
        self._log("tandem", f"stopping: open requests get {self._drain_s:g} s; Ctrl-C again ends them at once")
        deadline = time.monotonic() + self._drain_s
        last, *others = reversed(self.children.values())
        await last.stop(max(_QUIET_STOP_S, deadline - time.monotonic()))
        await asyncio.gather(*(child.stop(_QUIET_STOP_S) for child in others))
        await self._end_tasks()

    async def kill(self) -> None:
        """End every process at once."""
        await asyncio.gather(*(child.kill() for child in self.children.values()))
        await self._end_tasks()

    def pids(self) -> dict[str, int]:
        """Process id of each service that runs."""
        return {name: child.pid for name, child in self.children.items() if child.pid is not None}

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
