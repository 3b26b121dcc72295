"""The task suite outside of ``tandem bench``: its prompts, and a table and a picture of several runs.

``prompts`` prints JSON lines with ``category`` and ``prompt``, for programs that read prompts from a file. ``report``
reads files that ``tandem bench --text tasks --json`` wrote, adds them up and prints a Markdown table: a row per task, a
column per drafter, in each cell the acceptance length, the speed over plain decoding at the fewest sessions and the
break-even concurrency.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from specdec.errors import InvalidRequest
from specdec.flags import Parser
from tandem.bench.break_even import Curve, curves_of, draw_curves
from tandem.bench.plot import load_pyplot
from tandem.bench.tasks import TASKS, make_task_prompts


def read_sections(files: Sequence[str]) -> list[dict[str, Any]]:
    """The sections of the task suite in reports of ``tandem bench``.

    Raises :class:`InvalidRequest` naming a file that is none.
    """
    sections: list[dict[str, Any]] = []
    for file in files:
        try:
            report = json.loads(Path(file).read_text(encoding="utf-8"))
            sections += [
                section for section in report["sections"] if section["text"] in TASKS and not section.get("structured")
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{file} is no report of `tandem bench --json`: {error!r}") from None
    if not sections:
        raise InvalidRequest(
            f"{', '.join(files)}: no section of the task suite; run tandem bench --text tasks --json FILE"
        )
    return sections


def markdown(curves: Sequence[Curve]) -> str:
    """A row per task, a column per drafter."""
    modes = list(dict.fromkeys(curve.mode for curve in curves if curve.ratios))
    rows = [["", *modes], ["---"] * (1 + len(modes))]
    for task in dict.fromkeys(curve.task for curve in curves):
        cells = {curve.mode: _cell(curve) for curve in curves if curve.task == task and curve.ratios}
        rows.append([task, *(cells.get(mode, "–") for mode in modes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(curve: Curve) -> str:
    return f"{curve.length}, {next(iter(curve.ratios.values())).spread.median:.2f}, {curve.break_even}"


def main() -> int:
    """Print prompts or a report."""
    parser = Parser("python -m benchmarks.tasks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="print the prompts as JSON lines")
    prompts.add_argument("--count", type=int, default=4, help="prompts of each task")
    report = commands.add_parser("report", help="one table of several runs")
    report.add_argument("files", nargs="+", metavar="FILE", help="written by tandem bench --text tasks --json")
    report.add_argument("--plot", metavar="FILE", help="draw the speeds, as a PNG or SVG")
    args = parser.parse_args()
    if args.command == "prompts":
        made = {task: make_task_prompts(task, args.count) for task in TASKS}
        for number in range(args.count):  # task after task, so that the first lines are of all tasks
            for task in TASKS:
                print(json.dumps({"category": task, "prompt": made[task][number]}))
        return 0
    pyplot = load_pyplot() if args.plot else None
    curves = curves_of(read_sections(args.files))
    print(markdown(curves))
    if pyplot is not None:
        draw_curves(pyplot, "", curves, args.plot)
    return 0


if __name__ == "__main__":
    command.run("benchmarks.tasks", main)
