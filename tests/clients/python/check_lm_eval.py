"""`local-completions` (log-likelihoods, text; remote tokenizer by `/tokenizer_info`), `local-chat-completions`"""

import json
import subprocess
import sys

import pytest

QUESTIONS = [
    {"text": "def add(a, b):\n    return a", "choices": [" + b", " banana"], "answer": 0},
    {"text": "import", "choices": [" zebra zebra", " os"], "answer": 1},
]
TASKS = {
    "choose": {
        "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "write": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16}, "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture
def evaluate(tmp_path, base_url, model):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, task in TASKS.items():
        where = {"task": name, "dataset_path": "json", "test_split": "test"}
        where["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task | where))  # JSON is YAML

    def run(kind, path, *tasks, flags=(), arguments=""):
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", kind, "--tasks", *tasks, "--include_path", str(tmp_path),
            "--model_args", f"model={model},base_url={base_url}/{path},num_concurrent=2,max_retries=1{arguments}",
            "--output_path", str(tmp_path / "out"), *flags,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (result,) = (tmp_path / "out").rglob("results_*.json")
        return json.loads(result.read_text())["results"]

    return run


def test_completions(evaluate):
    remote = ",tokenizer_backend=remote,tokenized_requests=True"
    results = evaluate("local-completions", "completions", "choose", "perplexity", "write", arguments=remote)
    assert results["choose"]["acc,none"] == 1.0
    assert results["perplexity"]["word_perplexity,none"] > 1
    assert "exact_match,none" in results["write"]


def test_chats(evaluate):
    results = evaluate("local-chat-completions", "chat/completions", "write", flags=["--apply_chat_template"])
    assert "exact_match,none" in results["write"]
