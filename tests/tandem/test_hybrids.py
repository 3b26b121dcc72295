"""Targets and drafts with recurrent states, end to end: the text is that of plain decoding, whatever drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_service.core import DraftCore
from specdec.errors import InvalidRequest
from specdec.rules import Rule
from tandem import LLM, SamplingParams
from tandem.sampling_params import StructuredOutputsParams
from target_service.core import TargetCore
from tests.draft_first import draft_first
from tests.hybrids import KINDS, save_hybrid

PROMPTS = [
    "def main(argv):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self",
    "for i in range(",
]
NUM_TOKENS = 40
#: Texts whose distribution is compared: of these tokens, so long.
PAIR, LENGTH = [40, 41], 5
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True),
    # Of few tokens, so that the text repeats and lookups find some of it.
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=list(range(40, 46))),
    SamplingParams(temperature=0.9, seed=2, n=3, max_tokens=20, ignore_eos=True),
    # With tokens that the grammar forces.
    SamplingParams(
        temperature=0.7,
        seed=1,
        max_tokens=NUM_TOKENS,
        structured_outputs=StructuredOutputsParams(regex=r"(return|import) [a-z]{2} = self\.argument_parser[0-9]{3}"),
    ),
]
DRAFTERS = [
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": ["ngram", "draft_model"], "num_speculative_tokens": 6},
    # What the draft reads is fed again whenever its window moves.
    {"method": "draft_model", "num_speculative_tokens": 2, "draft_window_size": 24, "draft_sink_size": 4},
]


@pytest.fixture(autouse=True)
def drafts_open_first() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        draft_first(TargetCore, DraftCore, patch.setattr)
        yield


def texts_of(llm: LLM) -> list[list[int]]:
    """All prompts together, greedy and sampled."""
    return [
        list(sample.token_ids)
        for params in PARAMS
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
        for sample in output.outputs
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "gated delta net",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("short convolution", "mamba2")),
    ],
)
def test_text_is_that_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    target = save_hybrid(tmp_path / "target", kind)
    draft = save_hybrid(tmp_path / "draft", kind, noise=0.01)
    with LLM(target, dtype="float32", num_threads=1) as plain:
        wanted = texts_of(plain)
    tokenizer = AutoTokenizer.from_pretrained(target)
    stock = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt, text in zip(PROMPTS, wanted, strict=False):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        generated = stock.generate(ids, do_sample=False, max_new_tokens=NUM_TOKENS)
        assert generated[0, ids.shape[1] :].tolist() == text
    for config in DRAFTERS:
        with_model = {"model": draft} if "draft_model" in config["method"] else {}
        with LLM(
            target, dtype="float32", num_threads=1, speculative_config=config | with_model, fixed_draft_length=True
        ) as llm:
            assert texts_of(llm) == wanted, config
            # A lookup comes into play once the first tokens, which the target decodes by itself, have arrived.
            params = replace(PARAMS[2], max_tokens=5 * NUM_TOKENS)
            (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
            assert 0 < output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens, config


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_text_has_the_targets_distribution(kind: str, rule: Rule, tmp_path: Path) -> None:
    """Ratio rules, whose text depends on what was drafted: all texts of two tokens, counted over 1,024 samples."""
    target = save_hybrid(tmp_path / "target", kind)
    draft = save_hybrid(tmp_path / "draft", kind, noise=0.05)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": draft}
    with LLM(
        target, dtype="float32", num_threads=1, verification=rule, speculative_config=config, fixed_draft_length=True
    ) as llm:
        params = SamplingParams(temperature=1.0, n=128, max_tokens=LENGTH, ignore_eos=True, allowed_token_ids=PAIR)
        outputs = llm.generate([PROMPTS[0]] * 8, [replace(params, seed=seed) for seed in range(8)], use_tqdm=False)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 500
    counts = Counter(tuple(sample.token_ids) for output in outputs for sample in output.outputs)
    law = law_of(target, PROMPTS[0])
    assert sum(counts.values()) == 1024
    assert counts.keys() <= law.keys()
    fit = stats.chisquare([counts[text] for text in law], [1024 * law[text] for text in law])
    assert fit.pvalue > 1e-3


def law_of(folder: str, prompt: str) -> dict[tuple[int, ...], float]:
    """The probability of each text of ``LENGTH`` tokens out of ``PAIR``, by transformers."""
    start = AutoTokenizer.from_pretrained(folder)(prompt).input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        with torch.inference_mode():
            logits = model(torch.tensor([[*start, *text] for text in law])).logits[:, -1, PAIR]
        rows = zip(law.items(), logits.double().softmax(-1).tolist(), strict=True)
        law = {(*text, token): mass * p for (text, mass), row in rows for token, p in zip(PAIR, row, strict=True)}
    return law


def test_trees_are_refused_at_start(tmp_path: Path) -> None:
    target = save_hybrid(tmp_path / "target", "mamba2")
    draft = save_hybrid(tmp_path / "draft", "mamba2", noise=0.01)
    for model in (target, "python-12m"):
        with pytest.raises(InvalidRequest, match=r"recurrent states .* follow a chain of tokens and no tree"):
            LLM(model, speculative_config={"model": draft, "num_speculative_tokens": 6, "tree_top_k": 2})
