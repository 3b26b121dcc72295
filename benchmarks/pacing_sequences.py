"""Sequences of requests in which the load or the text changes: a steady load does not show what pacing does then.

``python -m benchmarks.pacing_sequences`` starts the services once, and runs each sequence with and without speculation
in turn, so that what drifts cancels. Easy texts are code, as the bundled draft knows it; hard ones are random tokens.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks import command
from benchmarks.pairs import pair
from specdec.flags import Parser
from specdec.params import SamplingParams

if TYPE_CHECKING:
    from tandem.bench.systems import System

Prompt = tuple[int, ...]
#: Answers a prompt and returns once its last token is there.
Ask = Callable[[Prompt], Awaitable[None]]
_PROMPT_TOKENS: Final = 16
_ODD: Final = (5, 6, 7, 8)


async def _one_after_the_other(ask: Ask, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        await ask(prompt)


async def odd_first(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """One odd request, then seven of code."""
    await _one_after_the_other(ask, [_ODD, *easy[:7]])


async def easy_after_hard(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """Four hard requests, then four easy ones."""
    await _one_after_the_other(ask, [*hard[:4], *easy[:4]])


async def hard_after_easy(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """Four easy requests, then four hard ones."""
    await _one_after_the_other(ask, [*easy[:4], *hard[:4]])


async def mixed(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """Two sessions at a time, one easy and one hard."""
    await asyncio.gather(_one_after_the_other(ask, easy[:4]), _one_after_the_other(ask, hard[:4]))


async def pauses(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """Easy requests with pauses between them."""
    for prompt in easy[:6]:
        await ask(prompt)
        await asyncio.sleep(0.2)


async def busy_core(ask: Ask, easy: Sequence[Prompt], hard: Sequence[Prompt]) -> None:
    """Easy requests; another process uses a core during the second half."""
    await _one_after_the_other(ask, easy[:4])
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass", stdin=subprocess.DEVNULL)
    try:
        await _one_after_the_other(ask, easy[4:8])
    finally:
        other.kill()
        await other.wait()


SEQUENCES: Final[Mapping[str, Callable[[Ask, Sequence[Prompt], Sequence[Prompt]], Awaitable[None]]]] = {
    each.__name__: each for each in (odd_first, easy_after_hard, hard_after_easy, mixed, pauses, busy_core)
}


async def measure(
    system: System, name: str, easy: Sequence[Prompt], hard: Sequence[Prompt], *, k: int, max_tokens: int, repeats: int
) -> list[float]:
    """Seconds without speculation over seconds with it, ``repeats`` times; every repeat takes other prompts."""
    ratios: list[float] = []
    first = count(0, 8)
    for repeat in range(repeats):
        seconds: dict[int, float] = {}
        begin = next(first)
        prompts = [[*each[begin % len(each) :], *each] for each in (easy, hard)]
        for length in (0, k) if repeat % 2 else (k, 0):

            async def ask(prompt: Prompt, length: int = length) -> None:
                params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
                async with aclosing(system.stream(prompt, params, None, length)) as pieces:
                    async for _ in pieces:
                        pass

            begun = time.perf_counter()
            await SEQUENCES[name](ask, *prompts)
            seconds[length] = time.perf_counter() - begun
        ratios.append(seconds[0] / seconds[k])
    return ratios


async def run(names: Sequence[str], *, k: int, max_tokens: int, repeats: int) -> None:
    """Measure and print each sequence, on services of its own: the first request counts."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.systems import start_system  # noqa: PLC0415 (gRPC)

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        deployment = pair("bundled", "good", k, Path(scratch))
        tokenizer = TextTokenizer.load(deployment.target.model.model)
        easy = pick_prompts(tokenizer.encode, 64, _PROMPT_TOKENS)
        hard = [tuple(draw.randrange(tokenizer.size) for _ in range(_PROMPT_TOKENS)) for _ in range(64)]
        for name in names:
            async with start_system("grpc", deployment) as system:
                ratios = await measure(system, name, easy, hard, k=k, max_tokens=max_tokens, repeats=repeats)
            shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{name}: speed with speculation over without {median(ratios):.2f} ({shown})", flush=True)


def main() -> int:
    """Measure, print."""
    flags = Parser("python -m benchmarks.pacing_sequences", description=__doc__)
    flags.add_argument(
        "--sequences", type=command.names(tuple(SEQUENCES)), default=tuple(SEQUENCES), help="default: all"
    )
    flags.add_argument("--k", type=int, default=4, help="drafted tokens a round at most (default: 4)")
    flags.add_argument("--max-tokens", type=int, default=128, help="tokens of a request (default: 128)")
    flags.add_argument("--repeats", type=int, default=3, help="times with and without speculation (default: 3)")
    args = flags.parse_args()
    asyncio.run(run(args.sequences, k=args.k, max_tokens=args.max_tokens, repeats=args.repeats))
    return 0


if __name__ == "__main__":
    command.run("benchmarks.pacing_sequences", main)
