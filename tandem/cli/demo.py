"""``tandem demo``: the bundled pair generates through a gateway, a draft service and a target service over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Final

from specdec.flags import Parser
from tandem.cli.serve import add_arguments as add_serve_arguments
from tandem.cli.serve import take_model
from tandem.launcher.deployment import deployment_of
from tandem.launcher.environment import tune_environment

PROMPTS: Final = (
    "    def close(self):\n",
    "try:\n    from _json import",
    "def main():\n    parser = argparse.ArgumentParser(",
)
_MAX_TOKENS: Final = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo has no flags: it shows the bundled pair."""


def run(_: argparse.Namespace) -> int:
    """Generate each prompt with and without drafts; the texts must be equal."""
    tune_environment()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # no word about services that end as they should
    return asyncio.run(_demo())


async def _demo() -> int:
    from specdec.params import SamplingParams  # noqa: PLC0415
    from tandem.bench.answers import collect  # noqa: PLC0415
    from tandem.bench.systems import start_system  # noqa: PLC0415

    parser = Parser()
    add_serve_arguments(parser)
    # A few short answers are over before a gateway has learned whether drafting pays on this machine: draft always.
    args = parser.parse_args(["--dtype", "float32", "--fixed-draft-length"])
    take_model(args)
    deployment = deployment_of(args)
    print(f"starting gateway, draft and target: {deployment.describe()}", flush=True)
    k = deployment.gateway.num_speculative_tokens
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS)
    equal = True
    async with start_system("grpc", deployment) as system:
        for prompt in PROMPTS:  # the first one warms up
            await collect(system.stream(prompt, params, None, k))
            plain = await collect(system.stream(prompt, params, None, 0))
            drafted = await collect(system.stream(prompt, params, None, k))
            equal = equal and plain.text == drafted.text
            rounds = sum(drafted.histogram)
            accepted = sum(a * n for a, n in enumerate(drafted.histogram))
            print(f"\n{prompt}{drafted.text}\n", flush=True)
            print(
                f"  plain {plain.num_tokens / plain.wall_s:.0f} tokens/s, speculative"
                f" {drafted.num_tokens / drafted.wall_s:.0f} tokens/s, acceptance length"
                f" {1 + accepted / max(rounds, 1):.2f}; the texts are {'equal' if equal else 'NOT EQUAL'}",
                flush=True,
            )
    if not equal:
        print("tandem: error: speculation changed a greedy text", file=sys.stderr)
    return 0 if equal else 1
