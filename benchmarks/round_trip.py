"""Where the time of a round goes: ``python -m benchmarks.round_trip``.

One session drafts k tokens in every round. The round is followed through gateway, draft and target, station by station
(:mod:`benchmarks.stations`): where the target asks the draft itself, and where the gateway does over frames and over
gRPC. Beside it: the same round in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.command import run
from benchmarks.pairs import TARGETS, pair
from benchmarks.stations import DIRECT, RELAYED, ROUTE, Stations
from specdec.errors import InternalError
from specdec.flags import Parser
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from tandem.bench.systems import System
    from tandem.launcher.deployment import Deployment

PROMPT: Final = "def fibonacci(n):\n"
#: Share of the rounds that must have passed each station once, in order.
MIN_SHARE: Final = 0.5
#: All stations, in the order of the table.
STATIONS: Final = (*RELAYED, *(station for station in DIRECT if station not in RELAYED))


@dataclass(frozen=True, slots=True)
class Rounds:
    """Medians over the rounds of one route, in microseconds."""

    route: str
    #: That passed the stations.
    num_rounds: int
    #: Of answers: the time of one divided by its rounds.
    round_us: float
    #: From the station before to each station; the first one's is from the last one.
    station_us: Mapping[str, float]
    #: CPU time of each process a round, all of its threads.
    cpu_us: Mapping[str, float]


async def follow(deployment: Deployment, route: str, seconds: float) -> Rounds:
    """Rounds of one session for so many seconds."""
    if route == "one process":
        from tandem.bench.systems import start_system  # noqa: PLC0415 (torch)

        async with start_system("embedded", deployment) as system:
            times, _ = await _stream(system, deployment.gateway.num_speculative_tokens, seconds, {})
        return Rounds(route, 0, 1e6 * median(times), {}, {})
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        times, cpu_us = await _stream_from_processes(deployment, route, seconds, Path(folder))
        num_rounds, station_us = durations(_read(Path(folder)), DIRECT if route == "direct" else RELAYED)
    return Rounds(route, num_rounds, 1e6 * median(times), station_us, cpu_us)


def _read(folder: Path) -> list[tuple[str, int]]:
    """What all services noted, in order of time."""
    noted = [(station, at) for log in folder.glob("*.json") for station, at in json.loads(log.read_text())]
    return sorted(noted, key=lambda event: event[1])


async def _stream_from_processes(
    deployment: Deployment, route: str, seconds: float, folder: Path
) -> tuple[list[float], dict[str, float]]:
    from specdec.rpc.channel import open_channel  # noqa: PLC0415
    from tandem.bench.systems import GrpcSystem  # noqa: PLC0415
    from tandem.launcher.deployment import services_of  # noqa: PLC0415
    from tandem.launcher.supervisor import Supervisor  # noqa: PLC0415

    free = replace(deployment, gateway=replace(deployment.gateway, port=0, grpc_port=0)).with_ports()
    services = [
        replace(
            service,
            module="benchmarks.stations",
            arguments=(str(folder / f"{service.name}.json"), service.module, *service.arguments),
            environment={**service.environment, ROUTE: route},
        )
        for service in services_of(free, folder)
    ]
    lines: list[str] = []
    async with (
        Supervisor(services, drain_s=2.0, log=lambda name, line: lines.append(f"[{name}] {line}")) as supervisor,
        open_channel(f"{free.gateway.host}:{free.gateway.grpc_port}") as channel,
    ):
        processes = {name: psutil.Process(pid) for name, pid in supervisor.pids().items()}
        return await _stream(GrpcSystem(channel), deployment.gateway.num_speculative_tokens, seconds, processes)


async def _stream(
    system: System, k: int, seconds: float, processes: Mapping[str, psutil.Process]
) -> tuple[list[float], dict[str, float]]:
    """Seconds of a round in each answer, and microseconds of CPU of each process per round; the server counts them."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    times: list[float] = []
    num_rounds, cpu_s = 0, dict.fromkeys(processes, 0.0)
    end = time.perf_counter() + seconds
    is_warm = False
    while time.perf_counter() < end or not times:
        before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
        async with aclosing(system.stream(PROMPT, params, None, k)) as answer:
            pieces = [piece async for piece in answer]
        if is_warm:
            count = (pieces[-1].speculation or {})["num_spec_steps"]
            times.append((pieces[-1].at - pieces[0].at) / count)
            num_rounds += count
            for name, process in processes.items():
                cpu_s[name] += sum(process.cpu_times()[:2]) - before[name]
        is_warm = True
    return times, {name: 1e6 * spent / num_rounds for name, spent in cpu_s.items()}


def durations(events: Sequence[tuple[str, int]], stations: Stations) -> tuple[int, dict[str, float]]:
    """How many rounds passed each station once and in order, and the median microseconds to each of their stations.

    Raises:
        InternalError: most rounds did not; the stations are not those of the services any more.
    """
    order = list(stations)
    first = order[0]
    begins = [index for index, (station, _) in enumerate(events) if station == first]
    rounds = [events[begin : end + 1] for begin, end in pairwise(begins)]
    whole = [each for each in rounds if [station for station, _ in each] == [*order, first]]
    if len(whole) < MIN_SHARE * len(rounds) or not whole:
        raise InternalError(f"only {len(whole)} of {len(rounds)} rounds passed the stations in order")
    steps = {
        station: median((each[index][1] - each[index - 1][1]) / 1e3 for each in whole)
        for index, station in enumerate([*order, first])
        if index
    }
    return len(whole), steps


def table_of(results: Sequence[Rounds]) -> Table:
    """A column for each transport, a row for each station."""
    table = Table("µs since the station before", *(each.route for each in results))
    for station in STATIONS:
        found = [each.station_us.get(station) for each in results]
        table.add_row(station, *("" if us is None else f"{us:.0f}" for us in found))
    table.add_section()
    table.add_row("round, at the client", *(f"{each.round_us:.0f}" for each in results))
    table.add_row("over one process", *(f"{each.round_us / results[-1].round_us:.2f}" for each in results))
    for name in results[0].cpu_us:
        table.add_row(f"CPU of the {name}", *(f"{each.cpu_us[name]:.0f}" if each.cpu_us else "" for each in results))
    table.add_row("rounds", *(f"{each.num_rounds or ''}" for each in results))
    return table


def main() -> int:
    """Measure and print."""
    parser = Parser("python -m benchmarks.round_trip", description=__doc__)
    parser.add_argument("--model", choices=TARGETS, default="bundled", help="the target (default: bundled)")
    parser.add_argument("--k", type=int, default=4, help="drafted tokens a round (default: 4)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each route (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    console = Console()
    results = asyncio.run(_follow_all(args))
    console.print(table_of(results))
    if args.json is not None:
        args.json.write_text(json.dumps({"rounds": [asdict(each) for each in results]}))
    return 0


async def _follow_all(args: argparse.Namespace) -> list[Rounds]:
    with tempfile.TemporaryDirectory() as scratch:
        deployment = pair(args.model, "good", args.k, Path(scratch))
    deployment = replace(deployment, gateway=replace(deployment.gateway, fixed_draft_length=True))
    return [await follow(deployment, each, args.seconds) for each in ("direct", "frames", "grpc", "one process")]


if __name__ == "__main__":
    run("round_trip", main)
