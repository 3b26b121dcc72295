"""How near the engine comes to a GPU's limit, on random weights in the shape of 1 B and 7 B models.

``python -m benchmarks.cuda`` first compares the GPU's answers with the CPU's; it ends with status 1 where they differ.
Then it times passes of the target and of a draft: against the bytes they must read and the bandwidth measured on the
same GPU, and verifying k + 1 tokens against decoding one. Last it runs ``tandem bench --compare hf`` on the pair, which
gives tokens per second of the services, plain and with drafts, and of Hugging Face ``generate``, alone and assisted.

``--device cpu --sizes tiny`` runs all of it on a CPU, to try the command; the numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import command
from specdec.errors import Unavailable
from specdec.flags import Parser

if TYPE_CHECKING:
    from benchmarks.agreement import Check
    from benchmarks.passes import Step
    from benchmarks.random_pairs import PairShape

SIZES: Final = ("1B", "7B", "tiny")
SESSIONS: Final = (1, 8, 32)
CONTEXTS: Final = (512, 4096)
#: Layers of the models that are compared with the CPU, in float32.
_CHECKED_LAYERS: Final = 2
_MAX_MODEL_LEN: Final = 8192
#: Share of the GPU's memory for the services; Hugging Face has its copies of the models in the rest.
_SERVICES_SHARE: Final = 0.6


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.cuda", description=__doc__)
    flags.add_argument("--sizes", type=command.names(SIZES), default=("1B", "7B"), help="1B, 7B, tiny")
    flags.add_argument("--device", default="cuda:0", help="default: cuda:0")
    flags.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the timings")
    flags.add_argument("--sessions", type=command.numbers, default=SESSIONS, help="at once")
    flags.add_argument("--contexts", type=command.numbers, default=CONTEXTS, help="entries each")
    flags.add_argument("--k", type=int, default=4, help="drafted tokens a round")
    flags.add_argument("--repeats", type=int, default=30, help="of every timing; medians count")
    flags.add_argument("--max-tokens", type=int, default=128, help="generated after each prompt")
    flags.add_argument("--num-prompts", type=int, default=4, help="prompts per session")
    flags.add_argument("--folder", type=Path, help="where the models are written (default: a folder that is removed)")
    flags.add_argument("--json", metavar="FILE", help="write the numbers to a file, too")
    return flags


def main() -> int:
    """Check, measure, print, write."""
    args = parser().parse_args()
    import torch  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "there is no CUDA device here; --device cpu --sizes tiny tries the command itself, without its meaning"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console = Console(width=130)
    console.print(f"{name}, torch {torch.__version__}", style="bold", highlight=False)
    with TemporaryDirectory() as scratch:
        found = {size: measure(size, args, args.folder or Path(scratch), console) for size in args.sizes}
    passed = all(check["passed"] for each in found.values() for check in each["checks"])
    if args.json:
        arguments = {flag: value for flag, value in vars(args).items() if flag != "json"}
        content = {"device": name, "torch": str(torch.__version__), "arguments": arguments, "sizes": found}
        Path(args.json).write_text(json.dumps(content, indent=1, default=str) + "\n")
    if not passed:
        print(f"benchmarks.cuda: error: {args.device} does not answer as the CPU does", file=sys.stderr)
    return 0 if passed else 1


def measure(size: str, args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """All numbers of one size; they are printed as they are found."""
    from dataclasses import replace  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from benchmarks.agreement import check_device  # noqa: PLC0415 (torch)
    from benchmarks.random_pairs import SHAPES, write_pair  # noqa: PLC0415 (torch)

    shape, device = SHAPES[size], torch.device(args.device)
    console.print(f"{size}: {shape.num_parameters / 1e9:.2f} billion weights on {args.device}", style="bold")
    few = replace(shape, num_layers=_CHECKED_LAYERS, num_draft_layers=_CHECKED_LAYERS)
    checked, _ = write_pair(
        few, folder / size / "checked", dtype=torch.float32, device=device, max_model_len=_MAX_MODEL_LEN
    )
    checks = list(check_device(checked, args.device))
    console.print(show_checks(checks))
    target, draft = write_pair(
        shape, folder / size, dtype=getattr(torch, args.dtype), device=device, max_model_len=_MAX_MODEL_LEN
    )
    parts = time_parts(shape, target, draft, args)
    console.print(show_steps(parts["steps"], parts["bandwidth"], args.k))
    console.print(show_parts(parts, args.k))
    speeds = time_services(target, draft, args, folder / size / "bench.json")
    return {
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        **parts,
        "steps": [
            asdict(step) | {"share": step.bandwidth / parts["bandwidth"], "verify_ratio": step.verify_ratio}
            for step in parts["steps"]
        ],
        "services": speeds,
    }


def time_parts(shape: PairShape, target: str, draft: str, args: argparse.Namespace) -> dict[str, Any]:
    """Passes of the target, drafted tokens and verdicts, in seconds; the memory's bandwidth in bytes a second."""
    import torch  # noqa: PLC0415

    from benchmarks import passes  # noqa: PLC0415 (torch)
    from engine.loading.load import load_engine  # noqa: PLC0415 (torch)
    from specdec.rules import Rule  # noqa: PLC0415 (torch)
    from specdec.settings import ModelSettings  # noqa: PLC0415 (torch)

    device = torch.device(args.device)
    found: dict[str, Any] = {}
    found["bandwidth"] = passes.measure_bandwidth(device, 2**31 if device.type == "cuda" else 2**27, args.repeats)
    loads = [(sessions, min(args.contexts)) for sessions in args.sessions]
    loads += [(min(args.sessions), context) for context in args.contexts if context != min(args.contexts)]
    modes = {"greedy": (Rule.BLOCK, 0.0), **{str(rule): (rule, 1.0) for rule in Rule}}

    engine = load_engine(ModelSettings(model=target, device=args.device))
    engine.warm_up()
    found["path"] = engine.runner.name
    found["steps"] = list(passes.time_steps(engine, shape, k=args.k, loads=loads, repeats=args.repeats))
    found["prefill_s"] = passes.time_prefill(engine, args.repeats)
    found["prefill_flops"] = passes.prefill_flops(shape, min(passes.PREFILL_ROWS, engine.info.max_model_len))
    found["verdict_s"] = {
        name: passes.time_verdict(engine, rule, temperature=temperature, k=args.k, repeats=args.repeats)
        for name, (rule, temperature) in modes.items()
    }
    engine.close()
    engine = load_engine(ModelSettings(model=draft, device=args.device))
    engine.warm_up()
    found["draft_weights"] = shape.draft.num_read
    found["draft_s"] = {
        name: passes.time_drafting(engine, rule, temperature=temperature, k=args.k, repeats=args.repeats)
        for name, (rule, temperature) in modes.items()
    }
    found["draft_bytes"] = shape.draft.num_read * torch.finfo(getattr(torch, args.dtype)).bits // 8
    engine.close()
    return found


def time_services(target: str, draft: str, args: argparse.Namespace, file: Path) -> Any:
    """``tandem bench`` on the pair, with Hugging Face beside it: its sections, which it also prints."""
    from tandem.cli import bench  # noqa: PLC0415

    flags = Parser("tandem bench")
    bench.add_arguments(flags)
    bench.run(
        flags.parse_args(
            [
                *("--model", target, "--speculative-config", json.dumps({"model": draft})),
                *("--device", args.device, "--dtype", args.dtype, "--k", str(args.k), "--compare", "hf"),
                *("--batch-size", ",".join(map(str, args.sessions)), "--max-tokens", str(args.max_tokens)),
                *("--num-prompts", str(args.num_prompts), "--gpu-memory-utilization", str(_SERVICES_SHARE)),
                *("--json", str(file)),
            ]
        )
    )
    return json.loads(file.read_text())["sections"]


def show_checks(checks: Sequence[Check]) -> Table:
    """What was compared with the CPU."""
    table = Table(title="against the CPU", title_justify="left")
    for column in ("", "difference", "allowed", ""):
        table.add_column(column)
    for check in checks:
        verdict = "same" if check.passed else "DIFFERENT"
        table.add_row(check.name, f"{check.difference:.2g}", f"{check.limit:g}", verdict)
    return table


def show_steps(steps: Sequence[Step], bandwidth: float, k: int) -> Table:
    """The target's passes."""
    table = Table(title=f"target passes; the memory gives {bandwidth / 1e9:.0f} GB/s", title_justify="left")
    for column in ("sessions", "context", "decode(1), ms", "GB/s", "share", f"verify({k + 1}), ms", "over decode(1)"):
        table.add_column(column, justify="right")
    for step in steps:
        table.add_row(
            *(str(step.sessions), str(step.context), f"{1e3 * step.decode_s:.3f}", f"{step.bandwidth / 1e9:.0f}"),
            *(f"{step.bandwidth / bandwidth:.0%}", f"{1e3 * step.verify_s:.3f}", f"{step.verify_ratio:.2f}"),
        )
    return table


def show_parts(parts: dict[str, Any], k: int) -> Table:
    """Drafting and deciding, by rule."""
    limit_ms = 1e3 * parts["draft_bytes"] / parts["bandwidth"]
    prefill = f"prefill {parts['prefill_flops'] / parts['prefill_s'] / 1e12:.1f} TFLOP/s"
    title = f"{parts['path']}; {prefill}; reading the draft takes {limit_ms:.3f} ms"
    table = Table(title=title, title_justify="left")
    for column in ("", "drafted token, ms", f"verdict on {k} drafts, ms"):
        table.add_column(column, justify="right")
    for name, seconds in parts["draft_s"].items():
        table.add_row(name, f"{1e3 * seconds:.3f}", f"{1e3 * parts['verdict_s'][name]:.3f}")
    return table


if __name__ == "__main__":
    command.run("benchmarks.cuda", main)
