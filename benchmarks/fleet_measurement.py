"""Costs of the bundled pair's steps on this machine, and a real fleet to compare the simulation with."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Final

import grpc.aio
import psutil

from benchmarks.counts import Counts
from benchmarks.fleet_simulation import Costs, DraftPlace, FleetSize, GatewayCost, MeasuredStep, Simulation
from benchmarks.service_process import StartedService, service
from gateway.text.tokenizer import TextTokenizer
from specdec.cores import usable_cores
from specdec.rpc.channel import open_channel
from specdec.v1 import draft_service_pb2_grpc, target_service_pb2_grpc, types_pb2
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.bench.limits import tokens_per_round
from tandem.bench.prompts import pick_prompts
from tandem.checkpoints import DRAFT, TARGET, find_checkpoint

NUM_PROMPTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCounts(Counts):
    """What a real fleet has done since its start."""

    wall_s: float = 0.0
    num_tokens: float = 0.0
    num_pieces: float = 0.0
    num_requests: float = 0.0
    num_rounds: float = 0.0
    num_accepted: float = 0.0
    #: CPU seconds of the processes.
    target_s: float = 0.0
    draft_s: float = 0.0
    gateway_s: float = 0.0
    client_s: float = 0.0
    target_steps: float = 0.0
    draft_steps: float = 0.0

    def ms(self, name: str, request_ms: float, count: float) -> float:
        """CPU milliseconds of ``count`` things, without those of requests."""
        return (1e3 * float(getattr(self, name)) - request_ms * self.num_requests) / max(count, 1.0)


@dataclass(frozen=True, slots=True)
class RealFleet:
    """Services in processes of their own, one thread each."""

    targets: Sequence[StartedService]
    drafts: Sequence[StartedService]
    gateways: Sequence[StartedService]
    prompts: Sequence[tuple[int, ...]]

    async def hold(self, num_sessions: int, k: int, num_tokens: int, seconds: float) -> FleetCounts:
        """Keep so many clients busy."""
        counted: Counter[str] = Counter()
        async with asyncio.TaskGroup() as group:
            clients = [
                group.create_task(self._client(counted, index, k, num_tokens, num_sessions))
                for index in range(num_sessions)
            ]
            await asyncio.sleep(1.5)  # all are decoding
            before = await self._count(counted)
            await asyncio.sleep(seconds)
            found = (await self._count(counted)).since(before)
            for client in clients:
                client.cancel()
        return found

    async def _client(self, counted: Counter[str], index: int, k: int, num_tokens: int, num_sessions: int) -> None:
        gateway = self.gateways[index % len(self.gateways)]
        prompts = cycle(self.prompts[index % len(self.prompts) :])
        length = max(1, num_tokens * (index + 1) // num_sessions)  # the first ends at another time for each
        async with open_channel(gateway.grpc_address) as channel:
            while True:
                request = pb.GenerateRequest(
                    token_ids=types_pb2.TokenIds(ids=next(prompts)),
                    max_tokens=length,
                    ignore_eos=True,
                    sampling=types_pb2.SamplingParams(temperature=0.0),
                    speculation=pb.SpeculationOptions(num_speculative_tokens=k),
                )
                async for piece in GenerationServiceStub(channel).Generate(request):
                    counted["num_tokens"] += len(piece.token_ids)
                    counted["num_pieces"] += 1
                    if piece.finish_reason:
                        counted["num_requests"] += 1
                        counted["num_rounds"] += piece.speculation.num_spec_steps
                        counted["num_accepted"] += piece.speculation.num_accepted_draft_tokens
                length = num_tokens

    async def _count(self, counted: Counter[str]) -> FleetCounts:
        return FleetCounts(
            wall_s=time.perf_counter(),
            target_s=_cpu_s(self.targets),
            draft_s=_cpu_s(self.drafts),
            gateway_s=_cpu_s(self.gateways),
            client_s=sum(psutil.Process().cpu_times()[:2]),
            target_steps=await _num_steps(self.targets, target_service_pb2_grpc.TargetServiceStub),
            draft_steps=await _num_steps(self.drafts, draft_service_pb2_grpc.DraftServiceStub),
            **counted,
        )


def _cpu_s(services: Sequence[StartedService]) -> float:
    return float(sum(sum(psutil.Process(each.pid).cpu_times()[:2]) for each in services))


async def _num_steps(services: Sequence[StartedService], stub: Callable[[grpc.aio.Channel], Any]) -> float:
    count = 0.0
    for each in services:
        async with grpc.aio.insecure_channel(each.address) as channel:
            count += (await stub(channel).GetModelInfo(types_pb2.GetModelInfoRequest())).load.num_batches
    return count


@contextmanager
def real_fleet(num_each: int, prompt_tokens: int) -> Iterator[RealFleet]:
    """So many of each service."""
    target, draft = find_checkpoint(TARGET), find_checkpoint(DRAFT)
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
        prompts = pick_prompts(TextTokenizer.load(target).encode, NUM_PROMPTS, prompt_tokens)
        yield RealFleet(targets, drafts, gateways, prompts)


#: Sessions of the loads that are measured and checked.
MEASURED_SESSIONS: Final = (2, 16)
CHECKED_SESSIONS: Final = (2, 4, 8, 16)


def measure(fleet: RealFleet, costs: Costs, seconds: float) -> Costs:
    """Costs in CPU time of the processes, all busy at once as they are in use; what is not measured stays."""
    k, num_tokens = costs.num_speculative_tokens, costs.output_tokens
    requests = asyncio.run(fleet.hold(2, k, 1, seconds))
    plain = [asyncio.run(fleet.hold(count, 0, num_tokens, seconds)) for count in MEASURED_SESSIONS]
    rounds = [asyncio.run(fleet.hold(count, k, num_tokens, seconds)) for count in MEASURED_SESSIONS]
    request = {name: requests.ms(name, 0.0, requests.num_requests) for name in ("target_s", "gateway_s", "client_s")}
    few, many = rounds
    prompt_ms = max(0.0, request["target_s"] - few.ms("target_s", request["target_s"], few.target_steps))
    target = _line([(each.num_pieces / each.target_steps, each.ms("target_s", request["target_s"], each.target_steps))
                    for each in rounds])  # fmt: skip
    alone = _line([(each.num_tokens / each.target_steps, each.ms("target_s", request["target_s"], each.target_steps))
                   for each in plain])  # fmt: skip
    draft = _line([(each.num_pieces / each.draft_steps, each.ms("draft_s", 0.0, each.draft_steps)) for each in rounds])
    per_prompt_row = prompt_ms / costs.prompt_tokens
    found = replace(
        costs,
        target_step_ms=MeasuredStep(target[0], target[1] / (k + 1), per_prompt_row),
        plain_step_ms=MeasuredStep(alone[0], alone[1], per_prompt_row),
        draft_step_ms=MeasuredStep(draft[0] / k, draft[1] / k, costs.draft_step_ms.per_prompt_row),
        gateway_ms=GatewayCost(
            request=request["gateway_s"] + request["client_s"],
            round=few.ms("gateway_s", request["gateway_s"], few.num_pieces),
            message=plain[-1].ms("gateway_s", request["gateway_s"], plain[-1].num_pieces),
        ),
        client_ms=many.ms("client_s", request["client_s"], many.num_pieces),
        acceptance_rate=_acceptance_rate(many, k),
    )
    return _with_shared(found, many.ms("gateway_s", request["gateway_s"], many.num_pieces))


def _with_shared(costs: Costs, round_ms: float) -> Costs:
    """What several rounds at a gateway share, so that each costs ``round_ms`` at the larger measured load."""
    low, high = 0.0, costs.gateway_ms.round / 3
    fitting = costs
    for _ in range(8):
        shared = (low + high) / 2
        fitting = replace(costs, gateway_ms=replace(costs.gateway_ms, shared=shared))
        here = replace(fitting, cores=usable_cores())
        outcome = Simulation(here, FleetSize(2, 2, 2, MEASURED_SESSIONS[-1], DraftPlace.SHARED)).run(8.0)
        rounds_per_s = outcome.tokens_per_s / tokens_per_round(costs.acceptance_rate, costs.num_speculative_tokens)
        busy_ms = 2e3 * outcome.busy["gateway"] - outcome.tokens_per_s / costs.output_tokens * costs.gateway_ms.request
        if busy_ms / rounds_per_s > round_ms:
            low = shared
        else:
            high = shared
    return fitting


def check(fleet: RealFleet, costs: Costs, seconds: float) -> Iterator[str]:
    """Throughput of two of each here, and of the simulation with as many cores."""
    here = replace(costs, cores=usable_cores())
    for mode, k in ((DraftPlace.SHARED, costs.num_speculative_tokens), (DraftPlace.PLAIN, 0)):
        for num_sessions in CHECKED_SESSIONS:
            window = asyncio.run(fleet.hold(num_sessions, k, costs.output_tokens, seconds))
            real = window.num_tokens / window.wall_s
            found = Simulation(here, FleetSize(2, 2, 2, num_sessions, mode)).run(20.0).tokens_per_s
            yield (
                f"{mode}, {num_sessions} sessions: {real:.0f} tokens/s here, {found:.0f} simulated"
                f" ({found / real - 1:+.0%})"
            )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Milliseconds of a step, and of each of its sessions, from steps of few and of many sessions.

    Where many cost less than few the difference is noise, and sessions cost nothing.
    """
    (x0, y0), (x1, y1) = points
    slope = max(0.0, (y1 - y0) / max(x1 - x0, 1e-9))
    return max(0.0, (y0 + y1 - slope * (x0 + x1)) / 2), slope


def _acceptance_rate(window: FleetCounts, k: int) -> float:
    """The rate at which rounds of k tokens accept as many as these did."""
    wanted = window.num_accepted / max(window.num_rounds, 1.0)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_per_round(middle, k) - 1 < wanted:
            low = middle
        else:
            high = middle
    return low
