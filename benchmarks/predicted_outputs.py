"""Predicted outputs: edits of a file, with and without ``prediction``; the bundled target without a draft.

The bundled target continues Python and follows no instructions, so tasks are made backwards. What it writes after the
beginning of held-out code is the edited file. The prediction is the file before, which differs by some edits (a name, a
line that is gone, a line that is new). Requests with and without it alternate and give the same text.

    python -m benchmarks.predicted_outputs --files 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from benchmarks.command import run
from benchmarks.service_process import service
from tandem.bench.edits import versions
from tandem.bench.prompts import pick_texts
from tandem.checkpoints import TARGET, find_checkpoint


@dataclass(frozen=True, slots=True)
class Timed:
    """One request."""

    text: str
    tokens_per_s: float
    usage: dict[str, Any]


def ask(client: httpx.Client, body: dict[str, Any]) -> Timed:
    """Time one request."""
    started = time.perf_counter()
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    seconds = time.perf_counter() - started
    return Timed(answer["choices"][0]["text"], answer["usage"]["completion_tokens"] / seconds, answer["usage"])


def measure(
    client: httpx.Client, num_files: int, num_edits: int, repeats: int, max_tokens: int
) -> list[dict[str, Any]]:
    """A row for each file, greedy and sampled."""
    rows = []
    for temperature in (0.0, 0.8):
        for seed, prompt in enumerate(pick_texts(num_files, 600)):
            body = {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": True,
            }
            written = ask(client, body).text
            before = next(islice(versions(written, seed), num_edits - 1, None))[1]
            predicted = body | {"prediction": {"type": "content", "content": before}}
            pairs = [(ask(client, body), ask(client, predicted)) for _ in range(repeats)]
            assert all(one.text == other.text == written for one, other in pairs)
            plain, fast = (statistics.median(each.tokens_per_s for each in side) for side in zip(*pairs, strict=True))
            details = pairs[-1][1].usage["completion_tokens_details"]
            rows.append(
                {
                    "temperature": temperature, "lines": written.count("\n"), "plain": round(plain),
                    "predicted": round(fast), "ratio": round(fast / plain, 2), **details,
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--edits", type=int, default=4, help="versions between the prediction and the text, 6 at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=1600)
    given = parser.parse_args(arguments)
    model = find_checkpoint(TARGET)
    with (
        service("target_service", "--model", model, "--port", "0") as target,
        service(
            "gateway", "--targets", target.address, "--tokenizer", model, "--port", "0", "--grpc-port", "0"
        ) as gateway,
        httpx.Client(base_url=f"http://{gateway.address}", timeout=120) as client,
    ):
        rows = measure(client, given.files, given.edits, given.repeats, given.max_tokens)
    print(json.dumps({"median ratio": statistics.median(row["ratio"] for row in rows)}))
    return 0


if __name__ == "__main__":
    run("predicted_outputs", main)
