"""How long two processes of this machine take to exchange a message over frames and over gRPC, without a service."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

from specdec.errors import InternalError
from specdec.rpc.framed.connection import FramedConnection

#: Bytes of a message: those of a round of four drafted tokens, about.
MESSAGE: Final = b"x" * 60
WARM_UP: Final = 200
START_TIMEOUT_S: Final = 60.0
METHOD: Final = "/echo/Echo"

_spawn = multiprocessing.get_context("spawn")


def measure(folder: Path, count: int) -> dict[str, float]:
    """Median microseconds of an echo over each transport, ``count`` echos each, over sockets in ``folder``."""
    medians = {}
    for name, (serve, ask) in TRANSPORTS.items():
        path, ready = str(folder / name.replace(" ", "-")), _spawn.Event()
        server = _spawn.Process(target=serve, args=(path, ready), daemon=True)
        server.start()
        if not ready.wait(START_TIMEOUT_S):
            raise InternalError(f"the echo server of {name} did not start within {START_TIMEOUT_S:g} s")
        medians[name] = 1e6 * median(ask(path, count + WARM_UP)[WARM_UP:])
        server.kill()
        server.join()
    return medians


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep so many cores busy, as threads that compute do."""
    processes = [_spawn.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


class _Echo(FramedConnection):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = asyncio.get_running_loop().create_task(self._echo())

    async def _echo(self) -> None:
        while (message := await self.next_message()) is not None:
            self.write_message(message)


def _serve_frames(path: str, ready: Event) -> None:
    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(_Echo, path)
        ready.set()
        await asyncio.Event().wait()

    uvloop.run(serve())


def _ask_frames(path: str, count: int) -> list[float]:
    async def ask() -> list[float]:
        _, connection = await asyncio.get_running_loop().create_unix_connection(FramedConnection, path)
        times = []
        for _ in range(count):
            began = time.perf_counter()
            connection.write_message(MESSAGE)
            await connection.next_message()
            times.append(time.perf_counter() - began)
        connection.abort_connection()
        await connection.next_message()  # once it is closed
        return times

    return uvloop.run(ask())


def _serve_aio(path: str, ready: Event) -> None:
    async def echo(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(message)

    async def serve() -> None:
        server = grpc.aio.server()
        handler: Any = grpc.stream_stream_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"Echo": handler}),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        ready.set()
        await server.wait_for_termination()

    uvloop.run(serve())


def _ask_aio(path: str, count: int) -> list[float]:
    async def ask() -> list[float]:
        times = []
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call: Any = channel.stream_stream(METHOD)()
            for _ in range(count):
                began = time.perf_counter()
                await call.write(MESSAGE)
                await call.read()
                times.append(time.perf_counter() - began)
            call.cancel()
        return times

    return uvloop.run(ask())


TRANSPORTS: Final[dict[str, tuple[Callable[[str, Event], None], Callable[[str, int], list[float]]]]] = {
    "frames": (_serve_frames, _ask_frames),
    "grpc.aio": (_serve_aio, _ask_aio),
}
