"""One table of all drafters: what they gain over the task suite, and what that costs.

``python -m benchmarks.drafters`` runs ``tandem bench --text tasks`` without pacing on the bundled target and on the
same padded to 200 M parameters. ``--json`` keeps what was measured, so that the table can be made in parts;
``--targets none`` prints what it holds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import command
from specdec.flags import Parser
from tandem.bench.break_even import ALL_TASKS, Curve, cell, curves_of

#: What ``tandem bench`` is told of a target.
TARGETS: Final[Mapping[str, Sequence[str]]] = {"bundled": (), "padded": ("--pad-target", "200M"), "none": ()}


def measure(target: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The sections of one run."""
    from tandem.cli import main as cli  # noqa: PLC0415 (torch)

    with tempfile.TemporaryDirectory() as scratch:
        out = str(Path(scratch, "out.json"))
        fixed = ["bench", "--text", "tasks", "--fixed-draft-length", "--json", out]
        if status := cli.main([*fixed, *TARGETS[target], *arguments]):
            raise SystemExit(status)
        sections: list[dict[str, Any]] = json.loads(Path(out).read_text())["sections"]
    return sections


def table(measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: a row for each drafter; what is no ratio is of the first target with the fewest sessions."""
    curves = {target: _curves(sections) for target, sections in measured.items()}
    listed = next(iter(measured.values()))
    alone = _curves([each for each in listed if each["num_sessions"] == min(each["num_sessions"] for each in listed)])
    cells = [
        (target, num) for target, own in curves.items() for num in sorted({n for c in own.values() for n in c.ratios})
    ]
    names = [f"{target}, {num}" for target, num in cells]
    rows = [["", "acceptance length", "draft, ms a round", "states, bytes a token", *names], ["---"] * (4 + len(names))]
    for mode in dict.fromkeys(mode for own in curves.values() for mode in own):
        known = [curves[target].get(mode) for target, _ in cells]
        first = alone.get(mode) or next(curve for curve in known if curve is not None)
        ratios = ["–" if curve is None else cell(curve, num) for curve, (_, num) in zip(known, cells, strict=True)]
        rows.append([f"`{mode}`", first.length, _show(first.draft_ms, ".2f"), _show(first.state_bytes, ".0f"), *ratios])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _curves(sections: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    return {curve.mode: curve for curve in curves_of(sections) if curve.task == ALL_TASKS and curve.ratios}


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def main() -> int:
    """Measure and print."""
    flags = Parser("python -m benchmarks.drafters", description=__doc__)
    flags.add_argument("--targets", type=command.names(tuple(TARGETS)), default=("bundled", "padded"))
    flags.add_argument("--drafters", default="all", help="as of tandem bench --drafter")
    flags.add_argument("--sessions", default="1,8", help="default: 1,8")
    flags.add_argument("--num-prompts", default="2", help="of each task and session")
    flags.add_argument("--max-tokens", default="32", help="of each answer")
    flags.add_argument("--json", type=Path, metavar="FILE", help="add to this file, and print all it holds")
    args = flags.parse_args()
    is_kept = args.json is not None and args.json.is_file()
    measured: dict[str, list[dict[str, Any]]] = json.loads(args.json.read_text()) if is_kept else {}
    options = ["--batch-size", args.sessions, "--num-prompts", args.num_prompts, "--max-tokens", args.max_tokens]
    for target in (each for each in args.targets if each != "none"):
        measured.setdefault(target, []).extend(measure(target, [*options, "--drafter", args.drafters]))
    if args.json is not None:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured))
    return 0


if __name__ == "__main__":
    command.run("benchmarks.drafters", main)
