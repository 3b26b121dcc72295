"""What the KV memory of sequences gives, and costs: ``python -m benchmarks.memory [SECTION…]``.

Plain decoding of the bundled target, in the processes that ``tandem serve`` runs.

- ``held``: sessions open at once in a pool of ``--blocks`` blocks. Each may fill the context of 2,048 tokens (64
  blocks); its client leaves when prompt and answer have 50 to 400 tokens (uniform).
- ``full``: tokens per second of 64 clients over a pool that holds 12 sessions of the longest kind, against a pool
  without a bound: with as many sessions open at most, and with as many as the small pool has in a step. The servers get
  the same requests in turn; half are greedy, half have a seed.
- ``shared``: time to first token after a system prompt of 1,500 tokens, which is new, or has been computed before.
- ``replay``: prompt tokens reused in chats of 8 turns, of those that an earlier turn has computed.
- ``prefill``: time between two pieces of 8 decoding sessions, before and while 32 prompts of 1,500 tokens arrive.
- ``bookkeeping``: microseconds that the blocks of 64 sessions that decode take in a step, without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Final

from benchmarks import command
from specdec.errors import TandemError
from specdec.flags import Parser
from specdec.process.cores import usable_cores
from tandem.bench.limits import Ratio, quantile

if TYPE_CHECKING:
    from benchmarks.memory_server import MemoryServer, Reply, Tokens
    from specdec.types import ServerLoad

Row = dict[str, Any]
#: A prompt, the tokens to generate after it, and the seed; None: greedy.
Request = tuple["Tokens", int, int | None]

CHUNKS: Final = (512, 256, 128, 64, 32)
PROMPT_TOKENS: Final = 32
#: Blocks that hold all requests of a section.
UNBOUNDED: Final = 4096


def prompts(num_tokens: int, seed: int) -> Iterator[Tokens]:
    """Endless different prompts: pieces of Python's own library."""
    from benchmarks.memory_server import tokenizer  # noqa: PLC0415 (gRPC)
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415

    pieces = pick_prompts(tokenizer().encode, 200, 200)
    text, source = [token_id for piece in pieces for token_id in piece], random.Random(seed)
    while True:
        start = source.randrange(len(text) - num_tokens)
        yield tuple(text[start : start + num_tokens])


async def held(args: argparse.Namespace) -> list[Row]:
    """Sessions open at once."""
    from benchmarks.memory_server import BLOCK_SIZE, CONTEXT, serve  # noqa: PLC0415

    num_clients, num_blocks = args.clients or 160, args.blocks
    source, given = random.Random(1), prompts(PROMPT_TOKENS, 1)
    samples: list[tuple[int, int]] = []
    async with serve(num_blocks) as server:

        async def client() -> None:
            while True:
                length = source.randint(50, 400) - PROMPT_TOKENS
                await server.ask(next(given), CONTEXT - PROMPT_TOKENS, leave_after=length)

        async def watch() -> None:
            while len(server.ended) < num_clients:  # noqa: ASYNC110 (at first all sessions are young)
                await asyncio.sleep(0.05)
            end = time.perf_counter() + args.seconds
            while time.perf_counter() < end:
                await asyncio.sleep(0.1)
                (load,) = await server.loads()
                samples.append((load.open_sessions, load.used_blocks))

        await while_running([client() for _ in range(num_clients)], watch())
    whole = num_blocks // (CONTEXT // BLOCK_SIZE)
    count, used = (median(values) for values in zip(*samples, strict=True))
    return [{"whole contexts": whole, "sessions open": count, "over those": count / whole, "blocks used": used}]


async def full(args: argparse.Namespace) -> list[Row]:
    """Throughput of a pool that is full."""
    from benchmarks.memory_server import BLOCK_SIZE, serve  # noqa: PLC0415

    num_clients, longest, source = args.clients or 64, 5 * BLOCK_SIZE, random.Random(2)
    num_blocks = 12 * (PROMPT_TOKENS + longest) // BLOCK_SIZE
    given, rows = prompts(PROMPT_TOKENS, 2), []

    def requests() -> list[Request]:
        lengths = (source.randint(BLOCK_SIZE, longest) for _ in range(3 * num_clients))
        return [(next(given), length, index if index % 2 else None) for index, length in enumerate(lengths)]

    for limit in args.batch_limits:
        async with AsyncExitStack() as stack:
            start = stack.enter_async_context
            small = await start(serve(num_blocks, max_num_seqs=limit))
            width = round((await serve_all(small, requests(), num_clients)).width)
            unbounded = await start(serve(UNBOUNDED, max_num_seqs=limit))
            servers = (unbounded, small, await start(serve(UNBOUNDED, max_num_seqs=width)))
            passes: tuple[list[Pass], ...] = [], [], []
            for number in range(args.repeats):
                drawn = requests()
                for own, server in [*zip(passes, servers, strict=True)][:: 1 if number % 2 else -1]:
                    own.append(await serve_all(server, drawn, num_clients))
        speeds = [[each.tokens_per_s for each in own] for own in passes]
        for name, own, speed in zip(("unbounded", "full", "as wide"), passes, speeds, strict=True):
            pairs = zip(own, passes[0], strict=True)
            rows.append(
                {"sessions at most": limit, "pool": name, "sessions in a step": median(each.width for each in own),
                 "tokens/s": median(speed), "over unbounded": Ratio.of(speed, speeds[0]).show(),
                 "over as wide": Ratio.of(speed, speeds[2]).show(),
                 "preemptions": sum(each.preemptions for each in own), "errors": sum(each.num_errors for each in own),
                 "other texts": sum(
                     one.texts.get(key, text) != text for one, other in pairs for key, text in other.texts.items()
                 )}
            )  # fmt: skip
    return rows


class Pass:
    """All of some requests: speed, tokens of a step and preemptions after as many as there are clients have ended."""

    def __init__(self) -> None:
        self.tokens_per_s = self.width = 0.0
        self.num_errors = 0
        self.preemptions = 0
        self.texts: dict[int, Tokens] = {}


async def serve_all(server: MemoryServer, requests: Sequence[Request], num_clients: int) -> Pass:
    """Each client sends its next request when the last one is answered."""
    done, queue = Pass(), iter(enumerate(requests))
    server.ended.clear()
    marks: list[tuple[float, ServerLoad]] = []

    async def client() -> None:
        for index, (prompt, max_tokens, seed) in queue:
            if len(server.ended) >= num_clients:
                marks.append((time.perf_counter(), (await server.loads())[0]))
            try:
                done.texts[index] = (await server.ask(prompt, max_tokens, seed=seed)).token_ids
            except TandemError:
                done.num_errors += 1

    await asyncio.gather(*(client() for _ in range(num_clients)))
    (begun, first), (ended, last) = marks[0], marks[-1]
    arrivals = [arrival for reply in server.ended for arrival in reply.arrivals]
    num_tokens = sum(len(piece) for at, piece in arrivals if begun < at <= ended)
    done.tokens_per_s = num_tokens / (ended - begun)
    done.width = num_tokens / (last.num_batches - first.num_batches)
    done.preemptions = last.preemptions - first.preemptions
    return done


async def shared(args: argparse.Namespace) -> list[Row]:
    """Time to first token, of a new system prompt and of one that is known."""
    from benchmarks.memory_server import serve  # noqa: PLC0415

    systems, users = prompts(1500, 3), prompts(16, 4)
    times: tuple[list[float], list[float]] = [], []
    cached = []
    async with serve(UNBOUNDED) as server:
        for system in islice(systems, 4 * args.repeats):
            for known in times:
                reply = await server.ask((*system, *next(users)), 2)
                known.append(1e3 * reply.ttft_s)
            cached.append(reply.num_cached)
    cold, warm = map(median, times)
    return [
        {"cold ms": cold, "known ms": warm, "known over cold": Ratio.of(times[1], times[0]).spread.median,
         "cached tokens": median(cached)}
    ]  # fmt: skip


async def replay(args: argparse.Namespace) -> list[Row]:
    """The share of what could be reused that is."""
    from benchmarks.memory_server import serve  # noqa: PLC0415

    rows = []
    for num_targets in (1, 2):
        async with serve(UNBOUNDED, num_targets=num_targets) as server:
            firsts, users, pauses = prompts(100, 5), prompts(40, 6), random.Random(7)
            while not all(load.num_batches for load in await server.loads()):  # until the gateway knows all targets
                await server.ask(next(firsts), 1)
            counts = await asyncio.gather(*(chat(server, next(firsts), users, pauses) for _ in range(8)))
            steps = " + ".join(str(load.num_batches) for load in await server.loads())
        possible, cached = (sum(column) for column in zip(*counts, strict=True))
        rows.append(
            {"targets": num_targets, "possible": possible, "cached": cached, "of the possible": cached / possible,
             "steps": steps}
        )  # fmt: skip
    return rows


async def chat(server: MemoryServer, first: Tokens, users: Iterator[Tokens], pauses: random.Random) -> tuple[int, int]:
    """Eight turns: tokens of the prompts that an earlier turn has computed, and those that were reused."""
    text, possible, cached = first, 0, 0
    for turn in range(8):
        possible += len(text) - 1 if turn else 0  # the last token of an answer is not fed
        prompt = (*text, *next(users))
        reply = await server.ask(prompt, 48, seed=turn)
        cached += reply.num_cached
        text = (*prompt, *reply.token_ids)
        await asyncio.sleep(pauses.uniform(0.0, 0.2))
    return possible, cached


async def prefill(args: argparse.Namespace) -> list[Row]:
    """Decoding sessions beside prompts, by the tokens of a step."""
    from benchmarks.memory_server import serve  # noqa: PLC0415

    num_prompts, length = args.clients or 32, 1500
    given = prompts(length, 8)
    results: dict[int, list[Row]] = {}
    async with AsyncExitStack() as stack:
        servers = {
            chunk: await stack.enter_async_context(serve(UNBOUNDED, max_num_batched_tokens=chunk))
            for chunk in args.chunks
        }
        for number in range(args.repeats):
            for chunk in args.chunks[:: 1 if number % 2 else -1]:
                arriving = list(islice(given, num_prompts))
                results.setdefault(chunk, []).append(await _protected(servers[chunk], arriving, args.seconds / 2))
    rows, most = [], [row["prefill tokens/s"] for row in results[max(args.chunks)]]
    for chunk, own in sorted(results.items(), reverse=True):
        gaps = ([each[name] for each in own] for name in ("p99 ms", "p99 ms before"))
        rows.append(
            {"tokens of a step": chunk, **{name: median(row[name] for row in own) for name in own[0]},
             "p99 over before": Ratio.of(*gaps).show(),
             "prefill kept": Ratio.of([each["prefill tokens/s"] for each in own], most).show()}
        )  # fmt: skip
    return rows


async def _protected(server: MemoryServer, arriving: Sequence[Tokens], seconds: float) -> Row:
    """8 sessions decode for some time, then prompts arrive; and how long those need without decoding."""
    short = prompts(16, 9)

    async def decode() -> None:
        while True:
            await server.ask(next(short), 1024)

    async def meanwhile() -> Row:
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        arrived = time.perf_counter()
        replies = await asyncio.gather(*(server.ask(prompt, 1) for prompt in arriving))
        ended = time.perf_counter()
        decoding = [reply for reply in (*server.open, *server.ended) if reply not in replies]
        before, during = gaps_ms(decoding, began, arrived), gaps_ms(decoding, arrived, ended)
        return {
            "p99 ms before": quantile(before, 0.99), "max ms before": max(before),
            "p99 ms": quantile(during, 0.99), "max ms": max(during),
            "prefill tokens/s": sum(map(len, arriving)) / (ended - arrived),
            "mean s to first token": mean(reply.ttft_s for reply in replies),
        }  # fmt: skip

    server.ended.clear()
    row: Row = await while_running([decode() for _ in range(8)], meanwhile())
    return row


def gaps_ms(replies: Sequence[Reply], begun: float, ended: float) -> list[float]:
    """From one piece to the next one, where that arrived in a time."""
    pairs = (pair for reply in replies for pair in pairwise(at for at, _ in reply.arrivals))
    return [1e3 * (after - before) for before, after in pairs if begun < after <= ended]


async def bookkeeping(args: argparse.Namespace) -> list[Row]:
    """What the event loop does for the blocks of sessions that decode, without a model."""
    from benchmarks.memory_server import BLOCK_SIZE, CONTEXT  # noqa: PLC0415 (gRPC)
    from engine.kv_pool import KVPool  # noqa: PLC0415
    from target_service.sequence_memory import SequenceMemory  # noqa: PLC0415

    num_sessions, times = args.clients or 64, []
    pool = KVPool(num_sessions * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    memory = SequenceMemory(pool)
    texts = [[number + 1, *range(CONTEXT - 1)] for number in range(num_sessions)]
    sequences = [memory.admit(text[: 16 + number], 0, CONTEXT, scope=("", "")) for number, text in enumerate(texts)]
    for number, each in enumerate(sequences):
        each.length = 16 + number
    for _ in range(CONTEXT - 100):
        began = time.perf_counter_ns()
        memory.come_back()
        for each, text in zip(sequences, texts, strict=True):
            if each.length >= each.capacity:
                memory.grow(each, each.length + 1)
            each.length += 1
            if each.length >= each.publishable_from:
                pool.publish(each, text)
        times.append((time.perf_counter_ns() - began) / 1e3)
    return [{"sessions": num_sessions, "µs a step, mean": mean(times), "median": median(times)}]


async def while_running(background: Sequence[Any], awaited: Awaitable[Any]) -> Any:
    """The result of ``awaited``; the others are cancelled then. Raises the error that one of them ends with."""
    tasks = [asyncio.ensure_future(each) for each in (awaited, *background)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {tasks[0]}:
            task.result()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


SECTIONS: Final[Mapping[str, tuple[Callable[[argparse.Namespace], Coroutine[Any, Any, list[Row]]], str]]] = {
    "held": (held, "at least 4 times as many as whole contexts"),
    "full": (full, "at least 0.95 of the throughput of an unbounded pool, as wide; no errors, no other texts"),
    "shared": (shared, "known at most 0.12 of cold"),
    "replay": (replay, "at least 0.98 of the possible"),
    "prefill": (prefill, "p99 at most 3 times that before, at least 0.9 of the prefill throughput kept"),
    "bookkeeping": (bookkeeping, "at most 20 µs"),
}


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([_show(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) < 20 else f"{value:,.0f}"


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.memory", description=__doc__)
    flags.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    flags.add_argument("--repeats", type=int, default=3, help="windows of each kind")
    flags.add_argument("--seconds", type=float, default=8.0, help="of a window, where one has a fixed length")
    flags.add_argument("--clients", type=int, help="sessions or prompts, in place of the section's own number")
    flags.add_argument("--blocks", type=int, default=512, help="held: blocks of the pool (default: 512)")
    flags.add_argument("--batch-limits", type=command.numbers, default=(24,), help="full: sessions at most")
    flags.add_argument("--chunks", type=command.numbers, default=CHUNKS, help="prefill: tokens of a step")
    flags.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return flags


def main() -> int:
    """Measure and print."""
    args = parser().parse_args()
    results: dict[str, list[Row]] = {}
    for name in command.names(tuple(SECTIONS))(",".join(args.sections or SECTIONS)):
        section, goal = SECTIONS[name]
        begun = time.monotonic()
        results[name] = asyncio.run(section(args))
        spent = f"{usable_cores()} cores, {time.monotonic() - begun:.0f} s"
        print(f"\n{name}: goal {goal} ({spent})\n\n{table(results[name])}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    command.run("benchmarks.memory", main)
