"""Whole stacks whose target has blocks for a few samples only: each answer is the one of a target with room for all."""

from __future__ import annotations

from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tandem.checkpoints import MODELS
from target_service.session.session import Session
from tests.reliability.rig import BLOCK_BYTES

TARGET, DRAFT, HEAD = (str(MODELS / name) for name in ("python-12m", "python-1m", "python-12m-eagle3"))
#: Of 32 tokens: twelve samples of up to 4 blocks share them.
NUM_BLOCKS = 14
PROMPTS = ["def main(argv):\n    ", "class Reader:\n    def __init__(self", "for i in range(", "import os\n", "x = "]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=100, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=100, stop=["\n\n", "return"], repetition_penalty=1.1),
    SamplingParams(temperature=0.9, max_tokens=90, seed=3, n=3, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=90, seed=4, n=3, stop=["def "], presence_penalty=0.5),
    SamplingParams(temperature=0.8, max_tokens=100, seed=5, n=4, prompt_logprobs=1, min_p=0.05, ignore_eos=True),
]


def answers(**given: Any) -> tuple[list[tuple[Any, ...]], list[float]]:
    """Each sample's answer, and the log-probabilities of all."""
    with LLM(TARGET, dtype="float32", block_size=32, **given) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    exact = [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in samples]
    rows = [row for scored in (*samples, *outputs) for row in _rows(scored) if row is not None]
    return exact, [entry.logprob for row in rows for entry in row.values()]


def _rows(scored: Any) -> Any:
    return getattr(scored, "logprobs", None) or getattr(scored, "prompt_logprobs", None) or ()


@pytest.fixture(scope="module")
def expected() -> tuple[list[tuple[Any, ...]], list[float]]:
    return answers()


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (None, 0.0),
        ({"model": DRAFT, "num_speculative_tokens": 4}, 0.0),
        ({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 4}, 0.0),
        # Rows of a tree have siblings between their entries: sums have another order.
        ({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 8, "tree_top_k": 3, "tree_depth": 3}, 1e-4),
        ({"method": "suffix", "num_speculative_tokens": 8}, 0.0),
    ],
)
def test_preempted_samples_have_the_same_answers(
    config: dict[str, Any] | None,
    tolerance: float,
    expected: tuple[list[tuple[Any, ...]], list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempted: list[Session] = []

    def preempt(session: Session) -> None:
        preempted.append(session)
        original(session)

    original = Session.preempt
    monkeypatch.setattr(Session, "preempt", preempt)
    exact, scores = answers(kv_cache_memory_bytes=(NUM_BLOCKS + 1) * BLOCK_BYTES, speculative_config=config)
    assert exact == expected[0]
    assert len(scores) > 500
    assert scores == pytest.approx(expected[1], abs=tolerance, rel=0.0)
    assert preempted
