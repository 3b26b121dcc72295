"""eight users for five seconds, streams and whole answers"""

import csv
import os
import subprocess
import sys

USERS = """
import json
from locust import HttpUser, task

class Client(HttpUser):
    @task
    def complete(self):
        self.client.post("/v1/completions", json={"prompt": "def add(a, b):\\n", "max_tokens": 16})

    @task
    def stream(self):
        body = {"messages": [{"role": "user", "content": "Name a language."}], "max_tokens": 16, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1] != b"data: [DONE]":
                answer.failure(f"ends with {lines[-1]}")
"""


def test_load(url, tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    command = [
        sys.executable, "-m", "locust", "-f", "users.py", "--headless", "--users", "8", "--spawn-rate", "8",
        "--run-time", "5s", "--stop-timeout", "10", "--host", url, "--csv", "out", "--only-summary",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "out_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert int(rows[path]["Request Count"]) > 0
        assert int(rows[path]["Failure Count"]) == 0
