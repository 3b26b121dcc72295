"""Chats without a session id over two targets, through gateways with and without ``--reuse-prefixes``, alternating.

A turn sends the whole chat so far, as most clients do. TTFT is that of all turns but the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx

from benchmarks.command import run
from benchmarks.service_process import service
from tandem.checkpoints import find_checkpoint

WORDS = ("def", "return", "import", "class", "self", "for", "in", "range", "print", "value", "index", "None", "True")
NUM_WORDS, MAX_TOKENS = 120, 32


@dataclass(slots=True)
class Figures:
    """What the chats of one gateway saw."""

    ttft_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0

    def describe(self) -> str:
        """One line."""
        share = self.num_cached_tokens / self.num_prompt_tokens
        return f"TTFT median {statistics.median(self.ttft_s) * 1e3:.0f} ms, {share:.0%} of the prompt tokens cached"


async def chat(client: httpx.AsyncClient, figures: Figures, rng: random.Random, num_turns: int) -> None:
    """One chat, turn after turn."""
    history = f"# {rng.random()}\n"
    for turn in range(num_turns):
        history += " ".join(rng.choices(WORDS, k=NUM_WORDS)) + "\n"
        body = {
            "prompt": history, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        asked_s, first_s = time.monotonic(), 0.0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event["choices"]:
                    first_s = first_s or time.monotonic()
                    history += event["choices"][0]["text"]
                if usage := event.get("usage"):
                    figures.num_prompt_tokens += usage["prompt_tokens"]
                    figures.num_cached_tokens += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        if turn:
            figures.ttft_s.append(first_s - asked_s)


async def chats(address: str, figures: Figures, *, seed: int, num_chats: int, num_turns: int) -> None:
    """Chats at the same time."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client:
        rngs = [random.Random(f"{seed} {index}") for index in range(num_chats)]
        await asyncio.gather(*(chat(client, figures, rng, num_turns) for rng in rngs))


def main() -> int:
    """Print a line for each kind of gateway."""
    parser = argparse.ArgumentParser(prog="benchmarks.prefixes", description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    target = find_checkpoint("python-12m")
    with ExitStack() as stack:
        model = ("--model", target, "--num-threads", "1", "--kv-cache-memory-bytes", str(400 << 20))
        targets = [stack.enter_context(service("target_service", *model)) for _ in range(2)]
        ports = ("--port", "0", "--grpc-port", "0", "--tokenizer", target)
        addresses = ("--targets", ",".join(each.address for each in targets))
        gateways = {
            name: stack.enter_context(service("gateway", *ports, *addresses, *flags))
            for name, flags in (("without", ()), ("with", ("--reuse-prefixes",)))
        }
        figures = {name: Figures() for name in gateways}
        for repeat in range(args.repeats):
            for name in sorted(gateways, reverse=bool(repeat % 2)):
                work = chats(
                    gateways[name].address, figures[name], seed=repeat, num_chats=args.chats, num_turns=args.turns
                )
                asyncio.run(work)
        for name, each in figures.items():
            print(f"{name} --reuse-prefixes: {each.describe()}")
    return 0


if __name__ == "__main__":
    run("benchmarks.prefixes", main)
