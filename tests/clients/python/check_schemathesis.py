"""invented requests for every path of `/openapi.json`: no server error; answers are as described"""

import json
import shutil
import subprocess
import urllib.request

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "unsupported_method", "negative_data_rejection",
)  # fmt: skip
#: Some are deleted; the others are asked for.
NUM_RESPONSES = 40
#: What is kept is complete.
NEVER = "POST /v1/responses/{response_id}/cancel"
CONFIG = """
[dictionaries.kept]
values = {kept}
[parameters]
"path.name" = {name}
"path.response_id" = {{ dictionary = "kept", probability = 0.8 }}
"body.previous_response_id" = {{ dictionary = "kept", probability = 0.3 }}
"""


def respond(url):
    """The id of a response that the server keeps."""
    body = json.dumps({"input": [{"role": "user", "content": "Hello"}], "max_output_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/responses", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["id"]


def test_the_description(url, model, tmp_path):
    config, report = tmp_path / "schemathesis.toml", tmp_path / "report.ndjson"
    kept = [respond(url) for _ in range(NUM_RESPONSES)]
    config.write_text(CONFIG.format(kept=json.dumps(kept), name=json.dumps(model)))
    command = [
        shutil.which("schemathesis"), "--config-file", str(config), "run", f"{url}/openapi.json",
        "--checks", ",".join(CHECKS), "--max-examples", "8", "--phases", "examples,coverage,fuzzing,stateful",
        "--seed", "1", "--continue-on-failure", "--request-timeout", "30", "--suppress-health-check", "all",
        "--report-ndjson-path", str(report),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert unanswered(url, report) == [NEVER]


def unanswered(url, report):
    """The operations that never answered with success."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    left = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    for line in report.read_text().splitlines():
        for recorder in (event.get("recorder", {}) for event in json.loads(line).values()):
            answers = (each["response"] or {} for each in recorder.get("interactions", {}).values())
            if any(answer.get("status_code") == 200 for answer in answers):
                left.discard(recorder["label"])
    return sorted(left)
