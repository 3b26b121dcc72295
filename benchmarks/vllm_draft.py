"""vLLM with Tandem's draft service as its drafter, beside vLLM without speculation and with its own drafters:
``python -m benchmarks.vllm_draft --vllm-python path/to/python``.

The exit status is 1 if a text differs from that of vLLM without speculation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.command import run
from benchmarks.service_process import StartedService, service
from specdec.errors import Unavailable
from specdec.process.cores import usable_cores
from tandem import checkpoints

ROOT: Final = Path(__file__).parents[1]
TARGET: Final = checkpoints.find_checkpoint(checkpoints.TARGET)
DRAFT: Final = checkpoints.find_checkpoint(checkpoints.DRAFT)
PROMPTS: Final = (
    "def fibonacci(n):\n",
    "import os\n\n\ndef walk(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(",
    "try:\n    import json\nexcept ImportError:\n",
    "def main():\n    parser = argparse.ArgumentParser()\n",
    "@dataclass\nclass Point:\n",
    "with open(path) as file:\n    for line in file:\n",
)
MODES: Final = ("plain", "tandem draft service", "killed draft service", "vllm draft_model", "vllm ngram")
#: One after the other, then all at once.
BATCHES: Final = [*([index] for index in range(len(PROMPTS))), [*range(len(PROMPTS))]]


def speculation(mode: str, k: int, address: str) -> dict[str, Any]:
    """The arguments of vLLM's engine."""
    methods: dict[str, dict[str, Any]] = {
        "plain": {},
        "vllm draft_model": {"method": "draft_model", "model": DRAFT},
        "vllm ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    }
    remote = {"method": "custom_class", "model": "tandem_integrations.vllm.RemoteProposer"}
    method = methods.get(mode, remote)
    engine = {"speculative_config": method | {"num_speculative_tokens": k}} if method else {}
    return engine | ({"additional_config": {"tandem": {"draft": address}}} if method is remote else {})


def generate(
    python: str, engine: dict[str, Any], num_tokens: int, threads: int, on_result: Callable[[], None]
) -> list[dict[str, Any]]:
    """What the engine in vLLM's environment generates, batch by batch."""
    job = {
        "engine": {"model": TARGET, "dtype": "float32", "max_model_len": 1024, "enforce_eager": True} | engine,
        "prompts": PROMPTS,
        "num_tokens": num_tokens,
        "batches": BATCHES,
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    openmp = next(Path(python).parents[1].rglob("libiomp5.so"), None)
    if openmp is not None:  # vLLM asks for it
        environment["LD_PRELOAD"] = str(openmp)
    command = [python, str(ROOT / "benchmarks" / "vllm_engine.py"), json.dumps(job)]
    results = []
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=messages, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"batch"'):
                results.append(json.loads(line))
                on_result()
        if process.wait() or len(results) < len(BATCHES):
            messages.seek(0)
            last = "".join(messages.readlines()[-20:])
            raise Unavailable(f"vLLM ended with status {process.returncode}:\n{last}")
    return results


def report(mode: str, results: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> bool:
    """Print one line; whether the texts are those of plain decoding."""
    count = len(results[0]["texts"][0])
    single = statistics.median(count / each["seconds"] for each in results[:-1])
    drafted = sum(each["drafted"] for each in results)
    accepted = sum(each["accepted"] for each in results) / drafted if drafted else 0.0
    ratio = statistics.median(old["seconds"] / new["seconds"] for old, new in zip(plain, results[:-1], strict=False))
    is_same = [each["texts"] for each in results] == [each["texts"] for each in plain]
    together = count * len(PROMPTS) / results[-1]["seconds"]
    print(
        f"{mode:24} {single:6.0f} tok/s ({ratio:.2f} of plain), {together:6.0f} tok/s at {len(PROMPTS)},"
        f" accepted {accepted:.3f} of {drafted:.0f}, texts {'equal' if is_same else 'DIFFER'}",
        flush=True,
    )
    return is_same


def main() -> int:
    """Run all modes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_draft", description=__doc__)
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM, grpcio and protobuf")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=usable_cores(), help="OpenMP threads of vLLM")
    parser.add_argument("--draft", default=DRAFT, help="folder of the draft service's model")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=MODES, help="some of them, plain first")
    args = parser.parse_args()
    plain: list[dict[str, Any]] = []
    is_same = True
    for mode in args.modes:
        with service("draft_service", "--model", args.draft, "--num-threads", "1", "--port", "0") as draft:
            countdown = iter([*[False] * (len(BATCHES) // 2), True])

            def kill(mode: str = mode, draft: StartedService = draft, countdown: Iterator[bool] = countdown) -> None:
                if mode.startswith("killed") and next(countdown, False):
                    os.kill(draft.pid, signal.SIGKILL)

            engine = speculation(mode, args.num_speculative_tokens, draft.address)
            results = generate(args.vllm_python, engine, args.num_tokens, args.threads, kill)
        plain = plain or results
        is_same &= report(mode, results, plain)
    return 0 if is_same else 1


if __name__ == "__main__":
    run("benchmarks.vllm_draft", main)
