"""a synchronous and a concurrent run with synthetic prompts; the report has times, and no errors"""

import json
import os
import shutil
import subprocess

import pytest


@pytest.mark.parametrize("profile", ["kind=synchronous", "kind=concurrent,streams=4"])
def test_a_benchmark(url, model, tmp_path, profile):
    tokenizer = os.environ["TANDEM_MODEL_FOLDER"]
    command = [
        shutil.which("guidellm"), "run", "--backend", f"kind=openai_http,target={url},model={model}",
        "--profile", profile, "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--constraint", "kind=max_requests,count=12",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 12
    assert totals["errored"] == 0
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
