"""The self-test of draft heads at start, on the bundled target: with processes, and in the offline API."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from specdec.methods import STATES_FILE
from tandem import LLM, SamplingParams
from tandem.training.checkpoint import save_draft
from tandem.training.parallel import as_parallel
from tests.e2e.servers import MODELS, TARGET_MODEL, Stack, draft_process, wait_until

HEAD = MODELS / "python-12m-eagle3"


def misread(tmp_path: Path, change: dict[str, object]) -> Path:
    """The head with another config than it was trained with. No shape shows it."""
    folder = tmp_path / "misread"
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lines_with(stack: Stack, text: str) -> list[str]:
    """Lines of the gateway's log, once one holds the text."""
    wait_until(lambda: any(text in line for line in stack.gateway.log), f"a line with {text!r}")
    return [line for line in stack.gateway.log if text in line]


@pytest.mark.exhaustive
def test_a_misread_head_is_reported_by_the_gateway_and_by_the_draft(stack: Stack, tmp_path: Path) -> None:
    head = misread(tmp_path, {"norm_before_residual": True})
    draft = draft_process("--target-model", TARGET_MODEL, model=str(head))
    with_head = Stack.start(stack.targets, [draft])
    try:
        (line,) = lines_with(with_head, "SELF-TEST FAILED")
        assert "draft misread (eagle3)" in line
        assert "2.4 are usual" in line
        assert "another target" in line
        wait_until(lambda: any("norm_before_residual is True" in line for line in draft.log), "the likely cause")
        assert with_head.complete("def f(", max_tokens=8)["choices"]
    finally:
        with_head.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"norm_before_residual": True}, "Likely cause: a wrong norm: norm_before_residual is True"),
        pytest.param(
            {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            "Likely cause: its layer ids, which are off by one. On the hidden states [1, 3, 5], not [0, 2, 4]",
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["as trained", "norm", "layers"],
)
def test_the_offline_api_names_the_likely_cause(
    tmp_path: Path, change: dict[str, object], words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    head = misread(tmp_path, change)
    with caplog.at_level(logging.WARNING), LLM(speculative_config={"method": "eagle3", "model": str(head)}) as llm:
        llm.generate(["def f("], SamplingParams(max_tokens=16))
        if words:
            wait_until(lambda: words in caplog.text, words)
    assert ("SELF-TEST" in caplog.text) == bool(words)


def reads_states(folder: Path, right: list[int], wrong: list[int]) -> None:
    """The target as a PARD-2 draft. Its matrix makes little of the states ``right`` and much of ``wrong``."""
    target = LlamaForCausalLM.from_pretrained(MODELS / "python-12m", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "python-12m")
    ids = tokenizer(Path(json.__file__).read_text()[:3000], return_tensors="pt").input_ids
    with torch.inference_mode():
        states = target(ids, output_hidden_states=True).hidden_states
    few, much = (torch.cat([states[i][0] for i in layers], -1) for layers in (right, wrong))
    little = few.T @ few + 0.3 * few.square().sum() / few.shape[1] * torch.eye(few.shape[1])
    inverse = torch.linalg.inv(torch.linalg.cholesky(little))
    shares, directions = torch.linalg.eigh(inverse @ (much.T @ much) @ inverse.T)
    matrix = torch.randn(target.config.hidden_size, 32) @ (inverse.T @ directions[:, -32:]).T
    save_draft(as_parallel(target, 4096), MODELS / "python-12m", folder)
    torch.save({"target_proj.weight": matrix * (len(ids[0]) / 32 / shares[-32:].mean()).sqrt()}, folder / STATES_FILE)


@pytest.mark.exhaustive
def test_wrong_states_of_pard_2_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, lines = tmp_path / "pard2", []
    reads_states(folder, [-1, -2], [-2, -3])
    config = json.loads((folder / "config.json").read_text())
    for layers in ([-1, -2], [-2, -3]):
        fields = {"pard2_target_layers": layers, "pard2_scale": 1.0}
        (folder / "config.json").write_text(json.dumps(config | fields))
        with caplog.at_level(logging.WARNING), LLM(speculative_config={"model": str(folder)}):
            pass
        lines.append([line for line in caplog.messages if "SELF-TEST FAILED: the target" in line])
    assert not lines[0]
    assert "its layer ids, which are off by one. On the hidden states [-1, 5], not [5, 4]," in lines[1][0]


@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_the_bundled_heads_reach_what_is_usual(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(speculative_config={"method": ["suffix", method]}):
        pass
    assert "SELF-TEST" not in caplog.text
