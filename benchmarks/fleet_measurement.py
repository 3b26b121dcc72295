"""Costs of the bundled pair's steps on this machine, and a real fleet to compare the simulation with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc.aio
import psutil

from benchmarks.fleet_simulation import Costs, DraftPlace, FleetSize, GatewayCost, MeasuredStep, Simulation
from benchmarks.service_process import StartedService, service
from specdec.cores import usable_cores
from specdec.rpc.channel import open_channel
from specdec.v1 import draft_service_pb2_grpc, target_service_pb2_grpc, types_pb2
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.checkpoints import find_checkpoint

PROMPT: Final = (Path(__file__).parents[1] / "specdec" / "types.py").read_text()


@dataclass(slots=True)
class FleetWindow:
    """What a real fleet did for a while."""

    seconds: float = 0.0
    num_tokens: int = 0
    num_pieces: int = 0
    num_requests: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    #: Seconds of work of the targets' and drafts' devices, their steps, and CPU seconds of gateways and clients.
    target_s: float = 0.0
    draft_s: float = 0.0
    target_steps: int = 0
    draft_steps: int = 0
    gateway_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RealFleet:
    """Services in processes of their own, one thread each."""

    targets: Sequence[StartedService]
    drafts: Sequence[StartedService]
    gateways: Sequence[StartedService]

    async def hold(self, costs: Costs, *, num_sessions: int, seconds: float, k: int) -> FleetWindow:
        """Keep so many clients busy."""
        window = FleetWindow()
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(costs, window, index, k)) for index in range(num_sessions)]
            await asyncio.sleep(2.0)  # all are decoding
            before, started_s = await self._busy(), time.perf_counter()
            for name in ("num_tokens", "num_pieces", "num_requests", "num_rounds", "num_drafted", "num_accepted"):
                setattr(window, name, 0)
            await asyncio.sleep(seconds)
            after, window.seconds = await self._busy(), time.perf_counter() - started_s
            for client in clients:
                client.cancel()
        spent = [late - early for early, late in zip(before, after, strict=True)]
        window.target_s, window.draft_s, window.gateway_s = spent[0], spent[2], spent[4]
        window.target_steps, window.draft_steps = round(spent[1]), round(spent[3])
        return window

    async def _client(self, costs: Costs, window: FleetWindow, index: int, k: int) -> None:
        gateway = self.gateways[index % len(self.gateways)]
        async with open_channel(gateway.grpc_address) as channel:
            number = 0
            while True:
                number += 1
                start = 97 * (31 * index + number) % (len(PROMPT) // 2)
                request = pb.GenerateRequest(
                    text=PROMPT[start : start + 3 * costs.prompt_tokens],
                    max_tokens=costs.output_tokens,
                    ignore_eos=True,
                    sampling=types_pb2.SamplingParams(temperature=0.0),
                    speculation=pb.SpeculationOptions(num_speculative_tokens=k),
                )
                async for piece in GenerationServiceStub(channel).Generate(request):
                    window.num_tokens += len(piece.token_ids)
                    window.num_pieces += 1
                    if piece.finish_reason:
                        window.num_requests += 1
                        window.num_rounds += piece.speculation.num_spec_steps
                        window.num_drafted += piece.speculation.num_draft_tokens
                        window.num_accepted += piece.speculation.num_accepted_draft_tokens

    async def _busy(self) -> list[float]:
        figures = [0.0] * 5
        for offset, services, stub in (
            (0, self.targets, target_service_pb2_grpc.TargetServiceStub),
            (2, self.drafts, draft_service_pb2_grpc.DraftServiceStub),
        ):
            for each in services:
                async with grpc.aio.insecure_channel(each.address) as channel:
                    load = (await stub(channel).GetModelInfo(types_pb2.GetModelInfoRequest())).load
                figures[offset] += load.busy_ns / 1e9
                figures[offset + 1] += load.num_batches
        pids = [None, *(each.pid for each in self.gateways)]
        figures[4] = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
        return figures


@contextmanager
def real_fleet(num_each: int) -> Iterator[RealFleet]:
    """So many of each service."""
    target, draft = find_checkpoint("python-12m"), find_checkpoint("python-1m")
    with ExitStack() as stack:
        targets = [
            stack.enter_context(service("target_service", "--model", target, "--num-threads", "1"))
            for _ in range(num_each)
        ]
        drafts = [
            stack.enter_context(
                service("draft_service", "--model", draft, "--num-threads", "1", "--quantization", "auto")
            )
            for _ in range(num_each)
        ]
        gateways = [
            stack.enter_context(
                service(
                    "gateway", "--targets", ",".join(each.address for each in targets), "--drafts",
                    ",".join(each.address for each in drafts), "--tokenizer", target, "--port", "0", "--grpc-port", "0",
                    "--fixed-draft-length",
                )
            )
            for _ in range(num_each)
        ]  # fmt: skip
        yield RealFleet(targets, drafts, gateways)


def measure(costs: Costs) -> Costs:
    """The costs of one gateway, one target and one draft here; what is not measured stays."""
    k = costs.num_speculative_tokens
    with real_fleet(1) as fleet:

        def hold(num_sessions: int, k: int) -> FleetWindow:
            return asyncio.run(fleet.hold(costs, num_sessions=num_sessions, seconds=4.0, k=k))

        alone, few, many = hold(1, 0), hold(1, k), hold(8, k)
    target = _line(few, many, k + 1)
    draft = _line(few, many, 1, is_draft=True)
    return replace(
        costs,
        target_step_ms=MeasuredStep(*target, per_prompt_row=target[1]),
        draft_step_ms=MeasuredStep(draft[0] / k, draft[1] / k),
        gateway_ms=GatewayCost(
            request=costs.gateway_ms.request,
            round=1e3 * many.gateway_s / max(many.num_pieces, 1),
            verdict=1e3 * alone.gateway_s / max(alone.num_pieces, 1),
        ),
        acceptance_rate=_acceptance_rate(many, k),
    )


def check(costs: Costs, seconds: float) -> Iterator[str]:
    """Throughput of two of each here, and of the simulation with as many cores."""
    shared = replace(costs, cores=usable_cores())
    with real_fleet(2) as fleet:
        for num_sessions in (2, 4, 16):
            k = costs.num_speculative_tokens
            window = asyncio.run(fleet.hold(costs, num_sessions=num_sessions, seconds=seconds, k=k))
            real = window.num_tokens / window.seconds
            found = Simulation(shared, FleetSize(2, 2, 2, num_sessions, DraftPlace.SHARED)).run(30.0).tokens_per_s
            yield f"{num_sessions} sessions: {real:.0f} tokens/s here, {found:.0f} simulated ({found / real - 1:+.0%})"


def _line(few: FleetWindow, many: FleetWindow, rows: int, *, is_draft: bool = False) -> tuple[float, float]:
    """Milliseconds of a step, and of each of its rows, from two loads with different numbers of rows a step."""
    points = []
    for window in (few, many):
        seconds, steps = (window.draft_s, window.draft_steps) if is_draft else (window.target_s, window.target_steps)
        rounds = max(window.num_pieces, 1)
        points.append((rows * rounds / max(steps, 1), 1e3 * seconds / max(steps, 1)))
    (x0, y0), (x1, y1) = points
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else -1.0
    if slope < 0 or (base := y0 - slope * x0) < 0:
        raise RuntimeError(
            f"steps of {x0:.1f} and {x1:.1f} rows took {y0:.2f} and {y1:.2f} ms, which no step's cost explains:"
            " repeat it with more seconds, on an idle machine"
        )
    return base, slope


def _acceptance_rate(window: FleetWindow, k: int) -> float:
    """The rate at which rounds of k tokens accept as many as these did."""
    wanted = window.num_accepted / max(window.num_rounds, 1)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, k + 1)) < wanted:
            low = middle
        else:
            high = middle
    return low
