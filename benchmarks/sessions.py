"""Memory soak: sessions opened and closed by the hundred, and the resident memory of each process before and after.

``python -m benchmarks.sessions`` starts the services itself; ``--grpc HOST:PORT`` uses running ones (of this machine,
so that their memory can be read). Every tenth session is abandoned in the middle. Exit status 1 when a process grew by
more than ``--limit``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

import grpc.aio
import psutil
from rich.console import Console
from rich.table import Table

from specdec.flags import Parser
from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.launcher.deployment import make_deployment, services_of
from tandem.launcher.socket_folder import socket_folder
from tandem.launcher.supervisor import Supervisor
from tandem.speculative_config import choose_models

SERVICES: Final = ("target_service", "draft_service", "gateway")


@asynccontextmanager
async def started() -> AsyncIterator[tuple[str, dict[str, int]]]:
    """The bundled pair in processes of its own: the gateway's gRPC address and the process ids."""
    from specdec.settings import ModelSettings  # noqa: PLC0415

    choice = choose_models(None, None)
    deployment = make_deployment(choice, ModelSettings(model=choice.target))
    free = replace(deployment, gateway=replace(deployment.gateway, port=0, grpc_port=0)).with_ports()
    with socket_folder() as sockets:
        async with Supervisor(services_of(free, sockets), drain_s=2.0, log=lambda *_: None) as supervisor:
            yield f"{free.gateway.host}:{free.gateway.grpc_port}", supervisor.pids()


def running() -> dict[str, int]:
    """Process ids of the services that run on this machine."""
    found: dict[str, int] = {}
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = process.info["cmdline"] or []
        for name in SERVICES:
            if name in command and "-m" in command:
                found[f"{name} {process.info['pid']}"] = process.info["pid"]
    return found


def memory_mb(pids: dict[str, int]) -> dict[str, float]:
    """Resident memory of each process."""
    return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}


async def run_sessions(address: str, count: int, concurrency: int, *, first: int = 0) -> None:
    """Open ``count`` sessions, ``concurrency`` at a time, each with a prompt of its own."""
    places = asyncio.Semaphore(concurrency)
    channel = open_channel(address)
    stub = GenerationServiceStub(channel)

    async def session(number: int) -> None:
        async with places:
            request = pb.GenerateRequest(
                text=f"def function_{number}(first, second):\n    ",
                sampling=types_pb.SamplingParams(temperature=1.0),
                max_tokens=16 + number % 32,
                ignore_eos=True,
            )
            call = stub.Generate(request)
            try:
                async for _ in call:
                    if number % 10 == 9:
                        return
            finally:
                call.cancel()

    try:
        await asyncio.gather(*(session(first + number) for number in range(count)))
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"sessions: error: {error.code().name}: {error.details()}") from None
    finally:
        await channel.close()


async def soak(args: argparse.Namespace, address: str, pids: dict[str, int]) -> int:
    """Warm up, measure, run, measure again."""
    await run_sessions(address, args.warm_up, args.concurrency)
    before = memory_mb(pids)
    begun = time.perf_counter()
    await run_sessions(address, args.sessions, args.concurrency, first=args.warm_up)
    took_s = time.perf_counter() - begun
    await asyncio.sleep(1.0)
    after = memory_mb(pids)
    table = Table(title=f"{args.sessions} sessions in {took_s:.1f} s", title_justify="left")
    for column in ("process", "before", "after", "growth"):
        table.add_column(column, justify="left" if column == "process" else "right")
    worst = 0.0
    for name, start in before.items():
        growth = after[name] / start - 1
        worst = max(worst, growth)
        table.add_row(name, f"{start:.1f} MiB", f"{after[name]:.1f} MiB", f"{growth:+.2%}")
    Console().print(table)
    return 0 if worst <= args.limit else 1


async def main() -> int:
    """Read the flags and run."""
    parser = Parser("benchmarks.sessions", description=__doc__)
    parser.add_argument("--grpc", metavar="HOST:PORT", help="gRPC address of a running gateway")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=200, help="sessions before the first measurement")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--limit", type=float, default=0.02, help="allowed growth of a process")
    args = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if args.grpc:
        return await soak(args, args.grpc, running())
    async with started() as (address, pids):
        return await soak(args, address, pids)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
