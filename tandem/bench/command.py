"""``tandem bench``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.errors import InvalidRequest
from specdec.sampling.params import SamplingParams
from tandem.deployment import Deployment, deployment_of
from tandem.environment import tune_environment
from tandem.flags import (
    add_model_flags,
    add_scheduler_flags,
    add_speculation_flags,
    rule_of,
)

#: Prompts, beyond those measured, that warm everything up and that are timed in parts.
_NUM_WARM_UP = 2
_NUM_PROBES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem bench``."""
    parser.add_argument("--model", help="folder or hub name of the target; without it the bundled pair is measured")
    group = parser.add_argument_group("measurement")
    group.add_argument("--k", type=int, help="drafted tokens a round; the same as --num-speculative-tokens")
    group.add_argument("--batch-size", type=int, default=1, help="sessions at once (default: 1)")
    group.add_argument("--num-prompts", type=int, default=8, help="prompts measured, per session (default: 8)")
    group.add_argument("--prompt-tokens", type=int, default=64, help="tokens of each prompt (default: 64)")
    group.add_argument("--max-tokens", type=int, default=128, help="tokens generated after each (default: 128)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument(
        "--services",
        choices=("grpc", "embedded"),
        default="grpc",
        help="processes over loopback, or everything in one process (default: grpc)",
    )
    group.add_argument("--hf", action="store_true", help="compare with Hugging Face generate in the same run")
    group.add_argument("--pad-target", metavar="SIZE", help="measure the target padded to this size, such as 200M")
    group.add_argument("--json", metavar="FILE", help="write everything to a file, too")
    add_model_flags(parser)
    add_scheduler_flags(parser)
    add_speculation_flags(parser)
    parser.set_defaults(dtype="float32")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the file."""
    for name in ("batch_size", "num_prompts", "prompt_tokens", "max_tokens"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"{name} is {getattr(args, name)}; it must be at least 1", param=name)
    tune_environment()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # no word about services that end as they should
    deployment = _deployment(args)
    from rich.console import Console  # noqa: PLC0415

    # Where there is no terminal to ask, the tables get the width they need.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    notes = Console(stderr=True)
    title, result, remarks = asyncio.run(_bench(args, deployment, notes))
    from tandem.bench.report import print_report  # noqa: PLC0415

    print_report(console, title, result, remarks)
    if args.json:
        content = {"title": title, "notes": remarks, "arguments": vars(args), **result.summary()}
        Path(args.json).write_text(json.dumps(content, indent=2, default=str) + "\n")
    return 0


def _deployment(args: argparse.Namespace) -> Deployment:
    """The pair to measure, the target padded where that was asked for."""
    if args.k is not None and not _names_drafter(args):
        if args.model is not None:
            raise InvalidRequest("--k needs a drafter: give --speculative-config", param="k")
        from tandem.checkpoints import DRAFT  # noqa: PLC0415

        args.speculative_model, args.num_speculative_tokens = DRAFT, args.k
    elif args.k is not None:
        args.num_speculative_tokens = args.k
    deployment = deployment_of(args)
    if deployment.draft is None:
        raise InvalidRequest("there is nothing to compare: give a drafter with --speculative-config", param="model")
    if args.pad_target:
        from tandem.padding import pad_checkpoint, parse_size  # noqa: PLC0415 (torch)

        model = deployment.target.model
        padded = pad_checkpoint(model.model, parse_size(args.pad_target))
        names = tuple(f"{name} padded to {args.pad_target}" for name in deployment.gateway.served_model_name)
        deployment = replace(
            deployment,
            target=replace(deployment.target, model=replace(model, model=padded)),
            gateway=replace(deployment.gateway, served_model_name=names),
        )
    return deployment


def _names_drafter(args: argparse.Namespace) -> bool:
    return bool(args.speculative_config or args.speculative_model)


async def _bench(args: argparse.Namespace, deployment: Deployment, notes: Any) -> tuple[str, Any, list[str]]:
    from gateway.tokenizer import TextTokenizer  # noqa: PLC0415
    from tandem.bench.huggingface import HuggingFace  # noqa: PLC0415
    from tandem.bench.measure import Plan, measure  # noqa: PLC0415
    from tandem.bench.prompts import pick_prompts  # noqa: PLC0415
    from tandem.bench.report import environment_notes  # noqa: PLC0415
    from tandem.bench.systems import start_system  # noqa: PLC0415

    assert deployment.draft is not None
    speculative, model = deployment.draft.speculative, deployment.target.model
    k, size = speculative.num_speculative_tokens, args.batch_size
    tokenizer = TextTokenizer.load(model.tokenizer or model.model)
    num_batches = _NUM_WARM_UP + args.num_prompts + _NUM_PROBES
    prompts = pick_prompts(tokenizer.encode, num_batches * size, args.prompt_tokens)
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    plan = Plan(
        warm_up=batches[:_NUM_WARM_UP],
        batches=batches[_NUM_WARM_UP : _NUM_WARM_UP + args.num_prompts],
        probes=batches[_NUM_WARM_UP + args.num_prompts :],
        params=SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True),
        rule=rule_of(args.verification),
        k=k,
    )
    threads = model.num_threads or len(os.sched_getaffinity(0))
    rival = None
    with notes.status("loading the models") as status:
        try:
            async with start_system(args.services, deployment) as system:
                if args.hf:
                    rival = await HuggingFace.start(
                        {
                            "target": model.model,
                            "draft": speculative.model,
                            "dtype": model.dtype,
                            "threads": threads,
                            "k": k,
                            "temperature": args.temperature,
                        }
                    )
                status.update("warming up")
                result = await measure(system, plan, rival=rival, tell=status.update)
        finally:
            if rival is not None:
                await rival.close()
    info, num_draft = result.target, result.draft.num_parameters if result.draft is not None else 0
    assert info is not None
    title = (
        f"{', '.join(deployment.gateway.served_model_name)}: target {info.num_parameters / 1e6:.1f} M, "
        + (f"draft {num_draft / 1e6:.1f} M" if num_draft else f"drafts by {speculative.method}")
        + f", {info.dtype}, {size} session{'s' if size > 1 else ''}"
    )
    rule = args.verification or "block"
    sampling = f"temperature {args.temperature:g}, rule {rule}" if args.temperature else "greedy"
    remarks = [
        f"{args.num_prompts} x {size} held-out prompts of {args.prompt_tokens} tokens, {args.max_tokens} new tokens"
        f" each, {sampling}; prefill included; services: {args.services}",
        *environment_notes(threads),
    ]
    return title, result, remarks


if __name__ == "__main__":
    sys.exit("run it as: tandem bench")
