"""invented requests for every path of `/openapi.json` but `/v1/responses`: no server error; answers are as described"""

import shutil
import subprocess

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "unsupported_method", "negative_data_rejection",
)  # fmt: skip
#: An invented request for it may generate until the context is full.
LEFT_OUT = "/v1/responses"


def test_the_description(url, tmp_path):
    command = [
        shutil.which("schemathesis"), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS),
        "--max-examples", "8", "--phases", "examples,coverage,fuzzing", "--seed", "1", "--continue-on-failure",
        "--request-timeout", "30", "--suppress-health-check", "all", "--exclude-path", LEFT_OUT,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
