"""Records what the page replays: the real events of runs of one prompt, by two methods and without speculation."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import httpx

RECORDING = Path(__file__).parents[2] / "gateway/playground/recording.json"
PROMPT = "def fibonacci(n):\n"
NUM_TOKENS = 96
#: Method and drafted tokens a round, as the page has them.
RUNS = (("draft_model", ""), ("ngram", ""), ("", "0"))


def record(base_url: str) -> dict:
    """The recording of a gateway."""
    with httpx.Client(base_url=base_url, timeout=120) as http:
        runs = [{"method": method, "k": k, "rule": "", "events": events(http, method, k)} for method, k in RUNS]
        services = http.get("/services").json()
    about = (
        f"Recorded on {datetime.now(UTC):%Y-%m-%d} with the bundled pair on two CPU cores, and played again in its own"
        " time. No model runs."
    )
    return {"about": about, "request": {"prompt": PROMPT}, "services": services, "runs": runs}


def events(http: httpx.Client, method: str, k: str) -> list:
    """The events of one run: [milliseconds, event]."""
    speculation = ({"method": method} if method else {}) | ({"num_speculative_tokens": int(k)} if k else {})
    body = {
        "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2, "stream": True,
        "return_token_metrics": True, "speculation": speculation,
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
        chosen = json.dumps({name: value for name, value in run.items() if name != "events"})
        runs.append(f'{chosen[:-1]}, "events": [\n{lines}\n]}}')
    RECORDING.write_text(json.dumps(head)[:-1] + ', "runs": [\n' + ",\n".join(runs) + "\n]}\n")
