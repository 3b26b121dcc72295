"""Drafts that draft some tokens alone: what they draw from is the same, but for the tokens that are left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import Segment
from engine.chains import ChainJob, draft_chains
from engine.engine import Engine
from engine.heads.dflash import DFlashHead
from engine.heads.head import DraftHead
from engine.loading.load import load_engine
from engine.native.rounded import quantise_linears
from engine.sampling.state import SamplingState
from engine.trimmed_outputs import output_linear, trim_outputs
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import ModelSettings
from tandem import LLM
from tandem import SamplingParams as Sampling
from tandem.checkpoints import MODELS
from tests.draft_service.drafters.heads.test_misread import dflash
from tests.engine.heads.random_heads import VOCAB, eagle, eagle3

DRAFT = MODELS / "python-1m"
IDS = torch.arange(0, 4096, 3)
TEXT = list(range(200, 240))


def logits_of(engine: Engine) -> torch.Tensor:
    sequence = engine.pool.open(64)
    try:
        return engine.forward([Segment(sequence, TEXT, len(TEXT))]).clone()
    finally:
        engine.pool.release(sequence)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"enforce_eager": True}], ids=str)
def test_a_draft_model_keeps_the_logits_of_its_tokens(options: dict[str, object]) -> None:
    settings = ModelSettings(
        model=str(DRAFT), device="cpu", dtype="float32", num_threads=1, kv_cache_memory_bytes=2**24, **options
    )  # type: ignore[arg-type]
    whole, trimmed = load_engine(settings), load_engine(settings, drafted=IDS)
    assert trimmed.runner.name == whole.runner.name, "it is no reason to leave the native decoder"
    assert trimmed.info.vocab_size == whole.info.vocab_size == 4096
    wanted, found = logits_of(whole), logits_of(trimmed)
    torch.testing.assert_close(found[:, IDS], wanted[:, IDS], rtol=1e-4, atol=1e-4)
    assert found.isneginf().sum() == len(TEXT) * (4096 - len(IDS))
    for temperature in (0.0, 1.0):
        state = SamplingState(SamplingParams(temperature=temperature, seed=1), TEXT, 1, 4096)
        sequence = trimmed.pool.open(64)
        (chain,) = draft_chains(trimmed, [ChainJob(sequence, TEXT, 6, state, Rule.BLOCK)])
        trimmed.pool.release(sequence)
        assert len(chain.token_ids) == 6
        assert not [token for token in chain.token_ids if token % 3], "only these are drafted"
    for engine in (whole, trimmed):
        engine.close()


@pytest.mark.parametrize("make", [dflash, lambda: eagle3(draft_vocab=VOCAB)], ids=["dflash", "eagle3"])
def test_a_head_keeps_the_rows_of_its_tokens(make: Callable[[], DFlashHead]) -> None:
    head, ids, x = make(), torch.tensor([3, 7, 50, 90]), torch.randn(5, 32)
    wanted = head.to_target_logits(head.logits(x))
    head.trim(ids)
    found = head.logits(x)
    assert found.shape == (5, 4)
    torch.testing.assert_close(head.to_target_logits(found)[:, ids], wanted[:, ids])
    assert head.to_target_logits(found).isneginf().sum() == 5 * (VOCAB - 4)
    with pytest.raises(InvalidRequest, match="the head brings a list of 4 tokens"):
        head.trim(ids)


def test_heads_that_cannot_say_so() -> None:
    head: DraftHead = eagle()
    with pytest.raises(InvalidRequest, match="a head of method eagle drafts all tokens"):
        head.trim(torch.tensor([1, 2]))


def test_texts_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(list(range(1500))))
    prompts, params = ["def main():\n    parser", "class A:\n"], Sampling(temperature=0.0, max_tokens=40)
    with LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 0}) as llm:
        usual = llm.generate(prompts, params)
    with LLM(speculative_config={"model": "python-1m", "draft_vocab": str(path)}) as llm:
        drafted = llm.generate(prompts, params)
    assert [each.outputs[0].text for each in drafted] == [each.outputs[0].text for each in usual]
    assert sum(each.metrics.num_accepted_tokens for each in drafted) > 10
    path.write_text(json.dumps([1, 5000]))
    with pytest.raises((InvalidRequest, ModelNotSupported), match="ids below 4096"):
        LLM(speculative_config={"model": "python-1m", "draft_vocab": str(path)})


def test_rounded_to_4_bits_the_output_layer_keeps_8() -> None:
    bits = {}
    for is_trimmed in (False, True):
        model = AutoModelForCausalLM.from_pretrained(MODELS / "python-1m", dtype=torch.float32)
        if is_trimmed:
            trim_outputs(model, torch.arange(0, 4096, 2))
        quantise_linears(model, bits=4)
        bits[is_trimmed] = output_linear(model).grouped.table is None
    assert bits == {False: True, True: True}, "codes of 8 bits have no table"
