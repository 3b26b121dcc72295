"""What a gateway costs, without models: ``python -m benchmarks.gateway_alone``.

One process is the gateway, one is a target and a draft that compute nothing, and this one is the clients. Figures are
for each second of CPU time of the gateway, whatever the others need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from itertools import product, starmap
from typing import Final, NamedTuple

import psutil
import uvloop

from benchmarks.command import names, numbers, run
from benchmarks.service_process import StartedService, service
from specdec.process.open_files import cap_connections, raise_file_limit
from specdec.rpc.channel import open_channel
from specdec.v1 import generation_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub
from tandem.checkpoints import TARGET, find_checkpoint

PROMPT: Final = "def fibonacci(n):\n"
#: Messages a second that all sessions together get: few enough that thousands of streams can be opened meanwhile.
MESSAGES_PER_S: Final = 1000
#: Requests that open at once: more would wait in the gateway's queue of new connections.
OPENING: Final = 64
STREAMS_PER_CHANNEL: Final = 1000
#: A client's stream of pieces: tokens of each.
Ask = Callable[[int, int], AsyncGenerator[int, None]]


@dataclass(frozen=True, slots=True)
class GatewayCosts:
    """What the gateway did and needed while the load was steady."""

    num_streams: int
    memory_kib: float
    seconds: float
    cpu_s: float
    num_messages: int
    num_tokens: int
    num_requests: int

    @property
    def message_us(self) -> float:
        """CPU microseconds of a message."""
        return 1e6 * self.cpu_s / max(self.num_messages, 1)

    @property
    def tokens_per_core(self) -> float:
        """Tokens of a second of a core."""
        return self.num_tokens / self.cpu_s

    @property
    def requests_per_core(self) -> float:
        """Requests of a second of a core."""
        return self.num_requests / self.cpu_s


class OpenStreams:
    """So many streams of one gateway, each with a request at a time."""

    def __init__(self, ask: Ask, num_streams: int, max_tokens: int) -> None:
        self._ask, self._max_tokens = ask, max_tokens
        self._opening = asyncio.Semaphore(OPENING)
        self._num_opened = 0
        self._all_open = asyncio.Event()
        self._num_streams = num_streams
        self.num_messages = self.num_tokens = self.num_requests = 0

    async def run(self, index: int) -> None:
        """One stream, until cancelled."""
        is_open = False
        await self._opening.acquire()
        while True:
            async with aclosing(self._ask(index, self._max_tokens)) as pieces:
                async for count in pieces:
                    self.num_messages += 1
                    self.num_tokens += count
                    if not is_open:
                        is_open = True
                        self._opening.release()
                        self._num_opened += 1
                        if self._num_opened == self._num_streams:
                            self._all_open.set()
            self.num_requests += 1

    async def hold(self, gateway: psutil.Process, empty_bytes: int, seconds: float) -> GatewayCosts:
        """What happens in so many seconds, once all have their first token."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(index)) for index in range(self._num_streams)]
            waiting = asyncio.create_task(self._all_open.wait())
            await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)  # or one fails
            memory = gateway.memory_info().rss - empty_bytes
            before, began = _cpu_s(gateway), time.perf_counter()
            self.num_messages = self.num_tokens = self.num_requests = 0
            await asyncio.sleep(seconds)
            costs = GatewayCosts(
                self._num_streams, memory / 1024 / self._num_streams, time.perf_counter() - began,
                _cpu_s(gateway) - before, self.num_messages, self.num_tokens, self.num_requests,
            )  # fmt: skip
            for task in tasks:
                task.cancel()
        return costs


def _cpu_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


async def over_grpc(stubs: list[GenerationServiceStub], index: int, max_tokens: int) -> AsyncGenerator[int, None]:
    """A request over gRPC."""
    request = pb.GenerateRequest(
        text=PROMPT, max_tokens=max_tokens, ignore_eos=True, sampling=types_pb.SamplingParams(temperature=0.0)
    )
    call = stubs[index % len(stubs)].Generate(request)
    try:
        async for piece in call:  # type: ignore[attr-defined]
            yield len(piece.token_ids)
    finally:
        call.cancel()


async def over_rest(port: int, index: int, max_tokens: int) -> AsyncGenerator[int, None]:
    """A request over HTTP, on a connection of its own. The last event tells the tokens of all, so it counts them."""
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        payload = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + payload)
        known = 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                total = event["usage"]["completion_tokens"]
                if total > known:
                    yield total - known
                    known = total
            elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise RuntimeError((line + await reader.read()).decode())
    finally:
        writer.close()


async def measure(
    gateway: StartedService, over: str, *, num_streams: int, max_tokens: int, seconds: float
) -> GatewayCosts:
    """Costs of a gateway that was started for so many streams."""
    process = psutil.Process(gateway.pid)
    async with AsyncExitStack() as stack:
        ask: Ask = partial(over_rest, gateway.ready["port"])
        if over == "grpc":
            num_channels = -(-num_streams // STREAMS_PER_CHANNEL)
            channels = [
                await stack.enter_async_context(open_channel(gateway.grpc_address)) for _ in range(num_channels)
            ]
            ask = partial(over_grpc, [GenerationServiceStub(channel) for channel in channels])
        for _ in range(32):  # what is loaded with the first request is no session's
            async with aclosing(ask(0, 1)) as pieces:
                async for _count in pieces:
                    pass
        return await OpenStreams(ask, num_streams, max_tokens).hold(process, process.memory_info().rss, seconds)


class Case(NamedTuple):
    """Transports to the clients and to target and draft, drafted tokens, and streams."""

    over: str
    backends_over: str
    k: int
    num_streams: int


def measure_started(case: Case, max_tokens: int, seconds: float) -> GatewayCosts:
    """Start what is needed, and measure."""
    num_streams = case.num_streams
    pause_ms = 1e3 * num_streams / MESSAGES_PER_S
    limits = ("--max-concurrent-sequences", f"{num_streams + 64}")
    connections = ("--max-connections", f"{num_streams + 64}", "--max-client-connections", f"{num_streams + 64}")
    backends = ("--pause-ms", f"{pause_ms}", "--max-sessions", f"{num_streams + 64}")
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, ExitStack() as stack:
        socket = f"unix:{folder}/fakes.sock"
        fakes = stack.enter_context(service("benchmarks.fake_backends", *backends, "--socket", socket))
        address = socket if case.backends_over == "frames" else fakes.address
        places = ("--targets", address, "--drafts", address, "--port", "0", "--grpc-port", "0")
        drafting = ("--fixed-draft-length", "--num-speculative-tokens", f"{case.k}")
        tokenizer = ("--tokenizer", find_checkpoint(TARGET))
        with service("gateway", *places, *drafting, *tokenizer, *limits, *connections) as gateway:
            job = measure(gateway, case.over, num_streams=num_streams, max_tokens=max_tokens, seconds=seconds)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(job)


def main() -> int:
    """Measure and print a line each."""
    parser = argparse.ArgumentParser(prog="benchmarks.gateway_alone", description=__doc__)
    parser.add_argument("--streams", type=numbers, default=(10, 1000, 10_000), help="open at once")
    parser.add_argument("--over", type=names(("grpc", "rest")), default=("grpc", "rest"), help="from the clients")
    parser.add_argument(
        "--backends-over", type=names(("frames", "grpc")), default=("frames",), help="to target and draft"
    )
    parser.add_argument(
        "--k", type=lambda text: tuple(map(int, text.split(","))), default=(0, 4), help="drafted tokens"
    )
    parser.add_argument("--max-tokens", type=int, default=16_384, help="of a request")
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    raise_file_limit()
    most = cap_connections(max(args.streams), num_servers=2)
    if "rest" in args.over and max(args.streams) > most:
        parser.error(
            f"REST takes {most} streams here: lower --streams, or raise the hard limit of open files (ulimit -Hn)"
        )
    for case in starmap(Case, product(args.over, args.backends_over, args.k, args.streams)):
        found = measure_started(case, args.max_tokens, args.seconds)
        requests = f", {found.requests_per_core:,.0f} requests/s" if found.num_requests else ""
        print(
            f"{case.over}, {case.backends_over}, k={case.k}, {case.num_streams} streams:"
            f" {found.num_messages / found.seconds:,.0f} messages/s, {found.message_us:.0f} µs each;"
            f" a core: {found.tokens_per_core:,.0f} tokens/s{requests}; {found.memory_kib:.0f} KiB a stream",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    run("benchmarks.gateway_alone", main)
