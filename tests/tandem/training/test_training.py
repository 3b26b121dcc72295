import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tandem.training.checkpoint import load_model, round_weights, save_model
from tandem.training.corpus import Document
from tandem.training.lesson import distillation_loss, write_lessons
from tandem.training.loss_weights import LossWeights
from tandem.training.measure import acceptance_length, count_rounds, held_out_loss
from tandem.training.pretrain import PretrainSettings, pretrain
from tandem.training.schedule import Schedule, ScheduleSettings
from tandem.training.shape import ModelShape
from tandem.training.tokenizer import encode_documents, train_tokenizer

TINY = ModelShape(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, vocab_size=300, max_length=128
)
DOCUMENTS = [
    Document(f"{name}.py", f'def {name}(x):\n    """Return {name}."""\n    return x + {i}\n' * 20)
    for i, name in enumerate(["alpha", "beta", "gamma", "delta"])
]


def tiny_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(TINY.config()).eval()
    for parameter in model.parameters():  # distributions far from flat, so that choices differ
        parameter.data *= 3
    return model


def test_the_whole_recipe_in_two_steps_each(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(DOCUMENTS, TINY.vocab_size)
    texts = encode_documents(tokenizer, DOCUMENTS, with_chat=True)
    assert len(texts) == 2 * len(DOCUMENTS)
    schedule = ScheduleSettings(num_steps=2, warmup_steps=1, decay_share=0.5)
    settings = PretrainSettings(
        schedule=schedule,
        batch_tokens=64,
        row_length=16,
        long_row_length=32,
        compiled=False,
        checkpoint_minutes=0.0,
        state_path=tmp_path / "state.pt",
    )
    target, resumed = LlamaForCausalLM(TINY.config()), LlamaForCausalLM(TINY.config())
    assert pretrain(target, texts, settings) == 128
    assert pretrain(resumed, texts, replace(settings, schedule=replace(schedule, num_steps=4))) == 256
    assert not torch.equal(resumed.lm_head.weight, target.lm_head.weight)

    round_weights(target)
    save_model(target, tokenizer, tmp_path / "target")
    save_model(target, tokenizer, tmp_path / "target")  # over the old one
    loaded = load_model(tmp_path / "target")
    assert loaded.dtype == torch.float32
    for name, value in target.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert {file.name for file in tmp_path.iterdir()} == {"state.pt", "target"}

    nats, bits = held_out_loss(loaded, tokenizer, DOCUMENTS[:1], window=64)
    assert 4 < nats < 7
    assert bits > 0


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    schedule = Schedule(ScheduleSettings(num_steps=100, warmup_steps=10, decay_share=0.2))
    factors = []
    while not schedule.done:
        factors.append(schedule.factor())
        schedule.advance()
    assert len(factors) == 100
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:80] == [1.0] * 70
    assert factors[-1] == pytest.approx(1 / 20)


def test_the_wall_clock_limit_brings_the_decay_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    schedule = Schedule(ScheduleSettings(num_steps=10**9, warmup_steps=1, decay_share=0.5, max_minutes=0.5))
    decayed = False
    while not schedule.done:
        decayed |= schedule.in_decay and schedule.factor() < 0.5
        now_s += 0.5 if schedule.step == 20 else 0.125  # one step stalls
        schedule.advance()
    assert decayed
    assert 230 <= schedule.step <= 240  # in 30 s


@pytest.mark.parametrize(
    ("accepted", "k", "rounds"),
    [
        ([True] * 10, 4, 2),
        ([False] * 3, 4, 3),
        ([True, False, True, True, False], 4, 2),
        ([True, True, True], 1, 2),
        ([], 4, 0),
    ],
)
def test_rounds_are_counted(accepted: list[bool], k: int, rounds: int) -> None:
    assert count_rounds(accepted, k) == rounds


@torch.inference_mode()
def test_greedy_acceptance_is_that_of_a_speculative_loop() -> None:
    target, draft = tiny_model(0), tiny_model(0)
    for parameter in draft.parameters():
        parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    prompts = torch.randint(1, TINY.vocab_size, (6, 5))

    def choose(model: LlamaForCausalLM, ids: list[int]) -> int:
        return int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())

    committed = rounds = 0
    for prompt in prompts.tolist():
        ids = list(prompt)
        while len(ids) < len(prompt) + 24:
            rounds += 1
            proposal = list(ids)
            for _ in range(4):
                proposal.append(choose(draft, proposal))
            for i in range(5):
                token = choose(target, ids)
                ids.append(token)
                if token == 0 or len(ids) == len(prompt) + 24 or (i < 4 and proposal[len(ids) - 1] != token):
                    break
            if ids[-1] == 0:
                break
        committed += len(ids) - len(prompt)
    measured = acceptance_length(target, draft, prompts, num_tokens=24, temperature=0.0)
    assert 1.0 < measured < 5.0
    assert measured == pytest.approx(committed / rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_accepts_all_of_its_own_proposals(temperature: float) -> None:
    model = tiny_model(1)
    model.config.eos_token_id = -1
    prompts = torch.randint(1, TINY.vocab_size, (4, 5))
    assert acceptance_length(model, model, prompts, num_tokens=20, temperature=temperature) == pytest.approx(5.0)


def test_the_loss_is_least_at_the_targets_own_distribution() -> None:
    target = tiny_model(2)
    rows = torch.randint(0, TINY.vocab_size, (2, 12))
    lesson = write_lessons(target, rows, top=TINY.vocab_size - 1).select(torch.arange(2))
    weights = LossWeights(greedy=0.0, variation=1.0)
    with torch.no_grad():
        logits = target(input_ids=rows).logits
        own = distillation_loss(logits, lesson, weights)
        other = distillation_loss(logits + 0.5 * torch.randn_like(logits), lesson, weights)
    assert abs(own) < 0.01 < other
