"""The prompts of the task suite as JSON lines with ``category`` and ``prompt``, for programs that read a file."""

from __future__ import annotations

import json

from benchmarks import command
from specdec.flags import Parser
from tandem.bench.tasks import TASKS, make_task_prompts


def main() -> int:
    """Print them."""
    parser = Parser("python -m benchmarks.tasks", description=__doc__)
    parser.add_argument("--count", type=int, default=4, help="prompts of each task")
    count = parser.parse_args().count
    made = {task: make_task_prompts(task, count) for task in TASKS}
    for number in range(count):  # task after task, so that the first lines are of all tasks
        for task in TASKS:
            print(json.dumps({"category": task, "prompt": made[task][number]}))
    return 0


if __name__ == "__main__":
    command.run("benchmarks.tasks", main)
