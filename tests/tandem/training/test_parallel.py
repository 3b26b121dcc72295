"""A draft that learns to draft in parallel: its pass against chains fed one at a time, and a whole training."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from draft_service.drafters.parallel import check_mask, check_prompt, mask_token
from engine.loading.load import load_engine
from specdec.settings import ModelSettings
from tandem.training.drafter import train_drafter
from tandem.training.lesson import Lessons
from tandem.training.parallel import as_parallel, kept_starts, parallel_logits, unroll_parallel
from tandem.training.settings import TrainSettings
from tests.llamas import build_llama

VOCAB, LENGTH, STEPS = 31, 12, 4


@pytest.fixture
def model() -> LlamaForCausalLM:
    return as_parallel(build_llama(seed=5, vocab_size=VOCAB, max_position_embeddings=64), VOCAB)


@pytest.fixture
def lesson() -> Lessons:
    generator = torch.Generator().manual_seed(3)
    shape = (2, LENGTH)
    return Lessons(
        rows=torch.randint(VOCAB, shape, generator=generator),
        top_ids=torch.randint(VOCAB, (*shape, 4), generator=generator),
        top_probs=torch.rand(*shape, 4, generator=generator) / 4,
        states=torch.empty(*shape, 0),
    )


@torch.inference_mode()
def alone(model: LlamaForCausalLM, row: torch.Tensor, start: int) -> torch.Tensor:
    """Logits [STEPS, V] of the chain from one position, in a pass of its own."""
    fed = torch.cat([row[: start + 2], torch.full((STEPS - 1,), VOCAB)])
    logits: torch.Tensor = model(input_ids=fed[None], use_cache=False).logits[0, -STEPS:]
    return logits


def test_the_mask_is_a_new_row_of_a_published_model(model: LlamaForCausalLM) -> None:
    assert (model.config.vocab_size, model.config.pard_token, model.config.spd_type) == (VOCAB + 1, VOCAB, "pard")
    table = model.get_input_embeddings().weight
    torch.testing.assert_close(table[VOCAB], table[:VOCAB].mean(0))
    assert as_parallel(model, 3).config.pard_token == VOCAB, "one that has a mask keeps it"
    padded = as_parallel(build_llama(seed=5, vocab_size=VOCAB, max_position_embeddings=64), 20)
    assert (padded.config.vocab_size, padded.config.pard_token) == (VOCAB, 20), "a padding row is taken first"


def test_chains_that_share_a_pass_are_those_fed_alone(model: LlamaForCausalLM, lesson: Lessons) -> None:
    with torch.inference_mode():
        measured = list(unroll_parallel(model, lesson, STEPS))
        trained = list(unroll_parallel(model.train(), lesson, STEPS))
    model.eval()
    assert [guess.offset for guess in measured] == [1, 2, 3, 4]
    for row in range(2):
        for start in range(LENGTH - STEPS):
            wanted = alone(model, lesson.rows[row], start)
            for step in range(STEPS):
                torch.testing.assert_close(measured[step].logits[row, start], wanted[step], atol=1e-4, rtol=1e-4)
        for step, guess in enumerate(trained):
            assert guess.starts is not None
            for at, start in enumerate(guess.starts.tolist()):
                wanted = alone(model, lesson.rows[row], start)[step]
                torch.testing.assert_close(guess.logits[row, at], wanted, atol=1e-4, rtol=1e-4)
    answers = trained[2].answers(lesson)
    assert trained[2].starts is not None
    assert answers.top_ids.equal(lesson.top_ids[:, trained[2].starts + 3])


def test_masks_that_see_other_chains_are_noticed(
    model: LlamaForCausalLM, lesson: Lessons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the pass is causal over all rows, as if the masks of all chains were one."""
    right = list(unroll_parallel(model, lesson, STEPS))
    call = LlamaForCausalLM.forward
    monkeypatch.setattr(
        LlamaForCausalLM, "forward", lambda self, attention_mask, **given: call(self, attention_mask=None, **given)
    )
    wrong = list(unroll_parallel(model, lesson, STEPS))
    torch.testing.assert_close(wrong[0].logits, right[0].logits)
    assert (wrong[1].logits - right[1].logits).abs().max() > 1e-2


def test_a_share_of_the_chains_goes_on() -> None:
    starts = kept_starts(100, 6, seed=4)
    assert [len(each) for each in starts] == [100, 70, 49, 34, 24, 20], "0.7 of those before, and a fifth at least"
    for before, after in pairwise(starts):
        assert set(after.tolist()) < set(before.tolist())
        assert after.equal(after.sort().values)
    assert kept_starts(100, 6, seed=4)[3].equal(starts[3])
    assert not kept_starts(100, 6, seed=5)[3].equal(starts[3])


def test_no_chain_has_a_step_without_its_masks_before(model: LlamaForCausalLM, lesson: Lessons) -> None:
    anchors = [torch.arange(6), torch.tensor([1, 4]), torch.tensor([4])]
    logits = parallel_logits(model, lesson.rows, anchors)
    assert [part.shape for part in logits] == [(2, 6, VOCAB + 1), (2, 2, VOCAB + 1), (2, 1, VOCAB + 1)]
    torch.testing.assert_close(logits[2][0, 0], alone(model, lesson.rows[0], 3)[2], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_a_draft_learns_to_draft_in_parallel(
    target: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From nothing, then on from its own files; a wrong mask is found when it is loaded."""
    settings = TrainSettings(
        method="draft",
        target=str(target),
        output=str(tmp_path / "output"),
        data=(str(data),),
        parallel=3,
        hidden_size=32,
        num_rows=64,
        row_length=64,
        prompt_length=16,
        num_held_out_rows=16,
        num_steps=120,
        batch_tokens=512,
        warmup_steps=10,
        rate=1e-2,
        eval_steps=60,
        num_speculative_tokens=3,
    )
    first, *_, rounded = train_drafter(settings)
    assert rounded.loss < 0.7 * first.loss
    assert rounded.acceptance.length > 1.7
    assert rounded.acceptance.rates[1] > 0.2, "two tokens of one pass"
    folder = tmp_path / "output"
    config = json.loads((folder / "config.json").read_text())
    size = json.loads((target / "config.json").read_text())["vocab_size"]
    assert (config["pard_token"], config["vocab_size"], config["draft_window_size"]) == (size, size + 1, 64)
    assert mask_token(str(folder), None) == size

    engine = load_engine(ModelSettings(model=str(folder), num_threads=1, kv_cache_memory_bytes=1 << 22))
    text = next(data.glob("*.py")).read_text()[:200]
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert check_prompt(str(folder))
    assert check_mask(engine, prompt, size)
    assert not caplog.records
    assert not check_mask(engine, prompt, 40), "a token of ordinary text"
    assert "after the mask token 40" in caplog.text
    engine.close()

    again = replace(settings, output=str(tmp_path / "again"), start_from=str(folder), num_steps=1, rate=1e-6)
    assert train_drafter(again)[0].loss == pytest.approx(rounded.loss, abs=1e-3)
