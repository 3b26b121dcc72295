"""What one odd request leaves behind: ``python -m benchmarks.odd_first``.

Two gateways, or two fronts in one process, on one target begin with a request each: one with random tokens, after which
few drafted tokens are right (both shares are printed), the other with a usual text. From the second on they get the
same requests, in turn. Exit status 1 where those after the odd one have less than ``--floor`` of the speed of the
others.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import command
from benchmarks.pairs import pair
from specdec.flags import Parser
from specdec.params import SamplingParams
from tandem.bench.limits import Ratio

if TYPE_CHECKING:
    from tandem.bench.systems import LocalSystem


async def answer(
    system: LocalSystem, prompt: Sequence[int], seed: int, temperature: float
) -> tuple[float, Mapping[str, int]]:
    """Tokens per second of one request, and its metrics of speculation."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=96, ignore_eos=True)
    async with aclosing(system.stream(prompt, params, None, None)) as stream:
        pieces = [piece async for piece in stream]
    speed = sum(piece.num_tokens for piece in pieces[1:]) / (pieces[-1].at - pieces[0].at)
    return speed, pieces[-1].speculation or {}


async def measure(args: argparse.Namespace, kind: str) -> Ratio:
    """Speed after an odd request over that after a usual one."""
    from gateway.text.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.systems import start_systems  # noqa: PLC0415 (gRPC)

    source = random.Random(0)
    odd = tuple(source.randrange(300, 900) for _ in range(60))
    with tempfile.TemporaryDirectory() as scratch:
        deployment = pair("bundled", "good", 4, Path(scratch))
        encode = TextTokenizer.load(deployment.target.model.model).encode
        usual, *prompts = pick_prompts(encode, args.requests + 1, 16)
        first = {"odd": (odd, 1.5), "usual": (usual, 0.8)}
        async with start_systems(kind, {"odd": deployment, "usual": deployment}) as systems:
            speeds: dict[str, list[float]] = {name: [] for name in systems}
            for name, (prompt, temperature) in first.items():
                _, metrics = await answer(systems[name], prompt, 0, temperature)
                drafted, accepted = metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]
                print(f"{kind}, {name} first request: {accepted} of {drafted} drafted tokens accepted", flush=True)
            for number, prompt in enumerate(prompts):
                for name in list(systems)[:: 1 if number % 2 else -1]:
                    speeds[name].append((await answer(systems[name], prompt, number, 0.8))[0])
    return Ratio.of(speeds["odd"], speeds["usual"])


def main() -> int:
    """Measure and print."""
    flags = Parser("python -m benchmarks.odd_first", description=__doc__)
    flags.add_argument("--requests", type=int, default=40, help="after the first one")
    flags.add_argument("--floor", type=float, default=0.95, help="the least ratio that is good enough")
    args = flags.parse_args()
    ratios = {kind: asyncio.run(measure(args, kind)) for kind in ("grpc", "embedded")}
    for kind, ratio in ratios.items():
        print(f"{kind}: {ratio.show()} ({ratio.quartiles})")
    return int(any(ratio.spread.median + ratio.error < args.floor for ratio in ratios.values()))


if __name__ == "__main__":
    command.run("benchmarks.odd_first", main)
