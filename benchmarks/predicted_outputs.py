"""Predicted outputs: edits of a file, with and without ``prediction``; the bundled target, alone or with its draft.

The bundled target continues Python and follows no instructions, so tasks are made backwards. What it writes after the
beginning of held-out code is the edited file. The prediction is the file before, which differs by some edits (a name, a
line that is gone, a line that is new). Requests with and without it alternate and give the same text.

With ``--wrong`` predictions are wrong: another file, and the text with a wrong word after each word. With ``--draft``
the bundled draft is served, too; then a third request of each round decodes plainly.

    python -m benchmarks.predicted_outputs --files 4
    python -m benchmarks.predicted_outputs --files 4 --wrong --draft
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from benchmarks.command import run
from benchmarks.service_process import service
from tandem.bench.edits import versions
from tandem.bench.prompts import pick_texts
from tandem.checkpoints import DRAFT, TARGET, find_checkpoint


@dataclass(frozen=True, slots=True)
class Timed:
    """One request."""

    text: str
    tokens_per_s: float
    usage: dict[str, Any]
    #: Of a round, beyond the target's queue and work.
    wire_ms: float


def ask(client: httpx.Client, body: dict[str, Any]) -> Timed:
    """Time one request."""
    started = time.perf_counter()
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    seconds = time.perf_counter() - started
    metrics = answer["metrics"]["speculative_decoding"]
    wire_ms = metrics["wire_ns"] / max(metrics["num_spec_steps"], 1) / 1e6
    return Timed(answer["choices"][0]["text"], answer["usage"]["completion_tokens"] / seconds, answer["usage"], wire_ms)


def wrong_predictions(written: str, other: str, seed: int) -> Iterator[tuple[str, str]]:
    """Names and texts of predictions that say nothing of ``written``. ``other``: an unrelated text."""
    yield "another file", other[: len(written)]
    words, rng = re.findall(r"\s*\S+", written), random.Random(seed)
    yield "wrong words between", "".join(word + rng.choice(words) for word in words)


def predictions(written: str, other: str, seed: int, given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Names and texts of the predictions to measure."""
    if given.wrong:
        yield from wrong_predictions(written, other, seed)
    else:
        yield "edited", next(islice(versions(written, seed), given.edits - 1, None))[1]


def measure(client: httpx.Client, given: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each file and prediction, greedy and sampled."""
    rows, order = [], random.Random(0)
    prompts = pick_texts(given.files, 600)
    others = pick_texts(2 * given.files, 6000)[given.files :]
    for temperature in (0.0, 0.8):
        for seed, (prompt, other) in enumerate(zip(prompts, others, strict=True)):
            body = {
                "prompt": prompt,
                "max_tokens": given.max_tokens,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": True,
            }
            written = ask(client, body).text
            for name, text in predictions(written, other, seed, given):
                predicted = body | {"prediction": {"type": "content", "content": text}}
                arms = {"without": body, "predicted": predicted}
                if given.draft:
                    arms["plain"] = body | {"speculation": {"num_speculative_tokens": 0}}
                answers: dict[str, list[Timed]] = {arm: [] for arm in arms}
                for _ in range(given.repeats):
                    for arm in order.sample(list(arms), len(arms)):
                        answers[arm].append(ask(client, arms[arm]))
                assert all(each.text == written for side in answers.values() for each in side)
                speeds = {arm: statistics.median(each.tokens_per_s for each in side) for arm, side in answers.items()}
                rows.append(
                    {
                        "prediction": name, "temperature": temperature, "lines": written.count("\n"),
                        **{arm: round(speed) for arm, speed in speeds.items()},
                        "ratio": round(speeds["predicted"] / speeds["without"], 3),
                        "wire_ms": round(statistics.median(each.wire_ms for each in answers["predicted"]), 2),
                        **answers["predicted"][-1].usage["completion_tokens_details"],
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
    parser.add_argument("--wrong", action="store_true", help="wrong predictions")
    parser.add_argument("--draft", action="store_true", help="serve the bundled draft, too")
    given = parser.parse_args(arguments)
    model = find_checkpoint(TARGET)
    with ExitStack() as stack:
        target = stack.enter_context(service("target_service", "--model", model, "--port", "0"))
        flags = ["--targets", target.address, "--tokenizer", model, "--port", "0", "--grpc-port", "0"]
        if given.draft:
            draft = service("draft_service", "--model", find_checkpoint(DRAFT), "--num-threads", "1", "--port", "0")
            flags += ["--drafts", stack.enter_context(draft).address]
        gateway = stack.enter_context(service("gateway", *flags))
        client = stack.enter_context(httpx.Client(base_url=f"http://{gateway.address}", timeout=120))
        rows = measure(client, given)
    for name in dict.fromkeys(row["prediction"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["prediction"] == name]
        print(json.dumps({"prediction": name, "median ratio": statistics.median(ratios)}))
    return 0


if __name__ == "__main__":
    run("predicted_outputs", main)
