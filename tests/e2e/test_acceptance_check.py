"""The self-test of draft heads at start, on the bundled target: with processes, and in the offline API."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
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
    wait_until(lambda: any(text in line for line in stack.gateway.log), 20, f"a line with {text!r}")
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
        wait_until(lambda: any("norm_before_residual is True" in line for line in draft.log), 20, "the likely cause")
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
    assert words in caplog.text if words else "SELF-TEST" not in caplog.text


@pytest.mark.parametrize("method", ["eagle3", "mlp_speculator"])
def test_the_bundled_heads_reach_what_is_usual(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(speculative_config={"method": ["suffix", method]}):
        pass
    assert "SELF-TEST" not in caplog.text
