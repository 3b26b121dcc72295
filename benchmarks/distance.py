"""Speed over plain decoding with the draft at a distance: ``python -m benchmarks.distance``.

Processes of the bundled pair: gateway and target on one socket, and between them and the draft a proxy that delays
what it passes on by half the round trip, with jitter, in order. The target is padded: a step takes ``--step`` ms at
least. ``rounds`` waits for each proposal, ``stream`` never does (docs/pacing.md). Windows of plain decoding and with
the draft alternate; both have the same prompts and seeds.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from benchmarks import command
from benchmarks.service_process import service
from specdec.flags import Parser
from specdec.params import SamplingParams
from tandem.bench.limits import Ratio

if TYPE_CHECKING:
    from tandem.bench.answers import Piece

WAYS: Final = ("rounds", "stream")
RTTS_MS: Final = (0.2, 1.0, 5.0, 20.0, 50.0, 100.0)
NUM_PROMPTS: Final = 64


async def delay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mean_s: float, jitter: float) -> None:
    """Pass bytes on in order, each piece after a delay of its own."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(data)
            waiting.task_done()

    delivering = asyncio.create_task(deliver())
    try:
        while data := await reader.read(2**16):
            drawn_s = mean_s * (1.0 + jitter * random.uniform(-1.0, 1.0))
            waiting.put_nowait((time.perf_counter() + drawn_s, data))
        await waiting.join()
    finally:
        delivering.cancel()
        writer.close()


@asynccontextmanager
async def proxy(address: str, rtt_ms: float, jitter: float) -> AsyncIterator[str]:
    """A port that leads to ``address`` over a slow line."""
    host, _, port = address.rpartition(":")
    connections: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        half_s = rtt_ms / 2e3
        with suppress(OSError, asyncio.CancelledError):
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(delay(reader, back, half_s, jitter), delay(there, writer, half_s, jitter))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)
        await asyncio.sleep(0)  # transports close


async def compare(gateway: str, prompts: list[tuple[int, ...]], args: Namespace) -> tuple[Ratio, dict[str, int]]:
    """Windows with the draft over windows without it, and what was counted in the former."""
    from benchmarks.load import hold  # noqa: PLC0415 (gRPC)
    from specdec.rpc.channel import open_channel  # noqa: PLC0415
    from tandem.bench.systems import GrpcSystem  # noqa: PLC0415

    counts: dict[str, int] = {}
    seeds = count()
    async with open_channel(gateway) as channel:
        system = GrpcSystem(channel)

        async def window(seed: int, seconds: float, k: int | None) -> float:
            async def ask(prompt: tuple[int, ...], length: int) -> AsyncGenerator[Piece, None]:
                params = SamplingParams(temperature=args.temperature, seed=seed, max_tokens=length, ignore_eos=True)
                async with aclosing(system.stream(prompt, params, None, k)) as pieces:
                    async for piece in pieces:
                        yield piece
                        for name, value in (piece.speculation or {}).items() if k is None else ():
                            if isinstance(value, int):
                                counts[name] = counts.get(name, 0) + value

            start = 7 * seed % NUM_PROMPTS
            load = [*prompts[start:], *prompts[:start]]
            held = await hold(ask, load, num_clients=args.sessions, max_tokens=args.max_tokens, seconds=seconds)
            return held.tokens_per_s

        await window(next(seeds), args.warm_up, None)
        counts.clear()
        plain: list[float] = []
        drafted: list[float] = []
        for seed in range(1, 1 + args.repeats):
            for is_plain in (seed % 2 == 0, seed % 2 == 1):
                (plain if is_plain else drafted).append(await window(seed, args.seconds, 0 if is_plain else None))
    return Ratio.of(drafted, plain), counts


async def measure(args: Namespace) -> list[dict[str, object]]:
    """Every way at every distance."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.checkpoints import DRAFT, TARGET, find_checkpoint  # noqa: PLC0415

    model, draft_model = find_checkpoint(TARGET), find_checkpoint(DRAFT)
    prompts = pick_prompts(TextTokenizer.load(model).encode, NUM_PROMPTS, 16)
    rows: list[dict[str, object]] = []
    k = ("--num-speculative-tokens", str(args.k))
    pace = ("--fixed-draft-length",) if args.fixed else ()
    with (
        tempfile.TemporaryDirectory(prefix="tandem-") as folder,
        service("draft_service", "--model", draft_model, "--port", "0", *k) as draft,
    ):
        for way in args.ways:
            socket = f"unix:{folder}/{way}"
            flags = (str(args.step), way, "--model", model, "--port", "0", "--socket", socket)
            with service("benchmarks.padded_target", *flags):
                for rtt_ms in args.rtts:
                    async with proxy(draft.address, rtt_ms, args.jitter) as line:
                        ports = ("--port", "0", "--grpc-port", "0", "--targets", socket, "--drafts", line)
                        with service("gateway", "--tokenizer", model, *ports, *k, *pace) as gateway:
                            ratio, counts = await compare(gateway.grpc_address, prompts, args)
                    row = {"way": way, "step_ms": args.step, "rtt_ms": rtt_ms, "sessions": args.sessions, **counts}
                    row |= {"median": ratio.spread.median, "quartiles": ratio.quartiles}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    return rows


def main() -> int:
    """Measure and print."""
    flags = Parser("python -m benchmarks.distance", description=__doc__)
    flags.add_argument("--ways", type=command.names(WAYS), default=WAYS)
    flags.add_argument("--rtts", type=lambda text: [float(part) for part in text.split(",")], default=RTTS_MS)
    flags.add_argument("--step", type=float, default=28.0, help="ms of a step at least")
    flags.add_argument("--jitter", type=float, default=0.2, help="of each delay, relatively")
    flags.add_argument("--sessions", type=int, default=1)
    flags.add_argument("--k", type=int, default=4, help="drafted tokens a round at most")
    flags.add_argument("--fixed", action="store_true", help="without pacing")
    flags.add_argument("--temperature", type=float, default=0.8)
    flags.add_argument("--warm-up", type=float, default=4.0, help="seconds the gateway learns at first")
    flags.add_argument("--repeats", type=int, default=5, help="windows of each kind")
    flags.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    flags.add_argument("--max-tokens", type=int, default=200)
    asyncio.run(measure(flags.parse_args()))
    return 0


if __name__ == "__main__":
    command.run("benchmarks.distance", main)
