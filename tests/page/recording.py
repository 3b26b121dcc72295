"""Records what the page replays: the real events of two runs of one prompt, with speculation and without."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx

RECORDING = Path(__file__).parents[2] / "gateway/playground/recording.json"
PROMPT = "def fibonacci(n):\n"
RUNS = (("", ""), ("0", ""))


def record(base_url: str) -> dict:
    """The recording of a gateway."""
    with httpx.Client(base_url=base_url, timeout=120) as http:
        runs = [{"k": k, "rule": rule, "events": events(http, k)} for k, rule in RUNS]
        services = http.get("/services").json()
    about = (
        f"Recorded on {datetime.now(UTC):%Y-%m-%d} with the bundled pair on two CPU cores, and played again in its own"
        " time. No model runs."
    )
    return {"about": about, "request": {"prompt": PROMPT}, "services": services, "runs": runs}


def events(http: httpx.Client, k: str) -> list:
    """The events of one run: [milliseconds, event]."""
    speculation = {"speculation": {"num_speculative_tokens": int(k)}} if k else {}
    body = {
        "prompt": PROMPT, "max_tokens": 96, "temperature": 0, "logprobs": 2, "stream": True,
        "return_token_metrics": True, **speculation,
    }  # fmt: skip
    http.post("/v1/completions", json={**body, "stream": False})  # the first one after a start is slower
    began, result = time.monotonic(), []
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                result.append([round(1000 * (time.monotonic() - began), 1), json.loads(line[6:])])
    return result


def save(recording: dict) -> None:
    """Write it, an event a line."""
    head = {name: value for name, value in recording.items() if name != "runs"}
    runs = []
    for run in recording["runs"]:
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in run["events"])
        runs.append(f'{{"k": {json.dumps(run["k"])}, "rule": {json.dumps(run["rule"])}, "events": [\n{lines}\n]}}')
    RECORDING.write_text(json.dumps(head)[:-1] + ', "runs": [\n' + ",\n".join(runs) + "\n]}\n")
