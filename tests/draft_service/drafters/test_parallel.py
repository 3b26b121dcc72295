"""A draft model that drafts in parallel: against the stock model over masks, and against targets that judge it."""

import asyncio
import json
import logging
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draft_service.drafters import parallel
from draft_service.drafters.draft_model import ModelDrafter
from draft_service.drafters.parallel import mask_token
from draft_service.drafters.window import DraftWindow
from draft_service.engine_stream import EngineStream
from engine.device_thread import DeviceThread
from engine.loading.load import load_engine
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.rules import Rule
from specdec.settings import DraftSettings, ModelSettings, SpeculativeSettings
from tests.draft_service.conftest import CONTEXT, MASK, VOCAB, build_draft, save_parallel
from tests.draft_service.drafters import test_lookup_rules as counted
from tests.draft_service.drafters.test_draft_model import (
    check_coupled_text,
    chi_square,
    draws_and_row,
    others,
    run_session,
)
from tests.draft_service.proposing import propose
from tests.draft_service.test_engine_stream import advance, opening, step
from tests.llamas import build_llama
from tests.until import until

PROMPT = [3, 14, 15, 9, 26, 5]
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
}


@torch.inference_mode()
def one_pass(model, token_ids, count):
    """What the model predicts after the tokens and after each of its masks."""
    ids = torch.tensor([[*token_ids, *[MASK] * (count - 1)]])
    return tuple(model(ids, use_cache=False).logits[0, -count:].argmax(-1).tolist()) if count else ()


@pytest.fixture
def start_parallel(start_core, parallel_checkpoint):
    def start(**options):
        return start_core(**{**options, "model": {"folder": parallel_checkpoint} | options.get("model", {})})

    return start


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_native", [True, False])
async def test_each_round_is_one_pass_over_masks(start_core, spec, tmp_path, model_type, is_native):
    """After every kind of verdict, for the architectures that are published."""
    sizes = {name: value for name, value in build_draft().config.to_dict().items() if name in SIZES}
    no_tokens = {f"{token}_token_id": None for token in ("bos", "eos", "pad")}
    config = AutoConfig.for_model(model_type, **sizes, **no_tokens)
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(config).eval()
    folder = save_parallel(model, tmp_path)
    torch.save({"target_proj.weight": torch.ones(32, 128)}, tmp_path / "warp_model.bin")  # of PARD-2
    rng = random.Random(1)
    async with start_core(k=6, model={"folder": folder, "quantization": None, "enforce_eager": not is_native}) as core:
        session = await core.open(spec(PROMPT))
        known, drafted = list(PROMPT), ()
        for number in range(24):
            new = [*drafted[: (0, 2, 6, 1)[number % 4]], *others(rng, (1, 1, 1, 30)[number % 4])]
            k = rng.randrange(1, 7)
            proposal = await propose(session, len(known), new, k)
            known += new
            drafted = proposal.token_ids
            assert drafted == one_pass(model, known, k), number
        await session.close()


async def test_batched_is_what_single_is(start_parallel, spec):
    rng = random.Random(3)
    openings = []
    for i in range(8):
        rule = (None, Rule.COUPLED, Rule.BLOCK, Rule.TOKEN)[i % 4]
        params = {"temperature": 0.0 if rule is None else 0.8, "seed": i, "rule": rule, "session_id": str(i)}
        if i % 3 == 0:
            params |= {"presence_penalty": 0.5, "top_k": 10}
        openings.append(spec(others(rng, rng.choice([1, 5, 60, 300])), **params))
    async with start_parallel(k=6, scheduler={"max_num_batched_tokens": 64}) as core:
        together = await asyncio.gather(*(run_session(core, opening, 12, i) for i, opening in enumerate(openings)))
        for i, opening in enumerate(openings):
            assert together[i] == await run_session(core, opening, 12, i)


async def test_a_text_beyond_the_window_and_the_end_of_the_context(start_parallel, spec, llama):
    window = DraftWindow(32, 4, 14)
    async with start_parallel(k=4, draft_window_size=32, draft_sink_size=4) as core:
        known = [i % 40 for i in range(60)]
        session = await core.open(spec(known, max_tokens=500))
        for _ in range(20):
            proposal = await propose(session, len(known), [7], 4)
            known.append(7)
            assert proposal.token_ids == one_pass(llama, window.read(known), 4)
        await session.close()
    async with start_parallel(k=4, model={"max_model_len": 64}) as core:
        known = [i % 40 for i in range(60)]
        session = await core.open(spec(known, max_tokens=500))
        sizes = []
        for _ in range(5):
            proposal = await propose(session, len(known), [7], 4)
            known.append(7)
            sizes.append(len(proposal.token_ids))
            assert proposal.token_ids == one_pass(llama, known, sizes[-1])
        assert sizes == [4, 3, 2, 1, 0]
        await session.close()


async def test_other_engines_are_drafted_for_in_steps(start_parallel, llama):
    """Both sequences of a step, as vLLM's and SGLang's integrations ask for them."""
    texts = {"a": [5, 6, 7], "b": [1, 2, 3]}
    async with start_parallel(k=4) as core:
        stream = EngineStream(core)
        await step(stream, open=[opening(name, token_ids=ids) for name, ids in texts.items()])
        await until(lambda: core.drafter.occupancy()[0] >= 2 and core.batcher.is_idle)
        await asyncio.sleep(0.01)
        for number in range(4):
            news = [[9], [9, 8]][number % 2]
            advances = [advance(name, len(ids), news) for name, ids in texts.items()]
            proposals, lost = await step(stream, advances=advances)
            assert not lost
            for name, ids in texts.items():
                ids.extend(news)
                assert tuple(proposals[name]) == one_pass(llama, ids, 4)
        await stream.close()


async def test_a_tree_takes_a_pass_for_each_level(start_core, start_parallel, spec):
    trees = []
    for start in (start_core, start_parallel):
        async with start(k=8, tree_top_k=3) as core:
            session = await core.open(spec(PROMPT))
            trees.append(await propose(session, 6, [1], 8))
            await session.close()
    assert trees[0].parents
    assert (trees[0].token_ids, trees[0].parents) == (trees[1].token_ids, trees[1].parents)


async def test_the_option_switches_it_off(start_parallel, spec, greedy):
    async with start_parallel(k=4, parallel_drafting=False) as core:
        session = await core.open(spec(PROMPT))
        assert (await propose(session, 6, [1], 4)).token_ids == greedy([*PROMPT, 1], 4)
        await session.close()


@pytest.mark.parametrize("position", [0, 2])
async def test_q_rows_are_what_tokens_were_drawn_from(start_parallel, spec, position):
    """A row is the same whatever was drawn before it."""
    async with start_parallel(k=3) as core:
        counts, rows = await draws_and_row(core, spec, 2000, position)
    (row,) = rows
    assert chi_square(counts, row, 2000) > 1e-4


async def test_coupled_text_is_the_targets(start_parallel, spec, make_target, kindred_engine):
    opening = spec(PROMPT, rule=Rule.COUPLED, temperature=1.0)
    await check_coupled_text(start_parallel, make_target, kindred_engine, opening)


@pytest.fixture
async def counted_drafter(tmp_path):
    """A model of the four tokens of :mod:`test_lookup_rules`, with padding behind them; the last id is the mask."""
    folder = save_parallel(build_llama(seed=3, vocab_size=8, max_position_embeddings=64), tmp_path, mask=7)
    settings = DraftSettings(
        speculative=SpeculativeSettings(model=folder, num_speculative_tokens=3),
        model=ModelSettings(model=folder, num_threads=1, kv_cache_memory_bytes=1 << 24),
    )
    thread = DeviceThread()
    engine = await thread.run(load_engine, settings.model)
    engine.info = replace(engine.info, tokenizer_size=counted.V)
    drafter = ModelDrafter(engine, thread, settings, 7)
    yield drafter
    await drafter.shutdown()


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_ratio_rules_keep_the_targets_distribution(counted_drafter, spec, rule):
    texts = await counted.texts_of(counted_drafter, partial(spec, max_tokens=24), rule, 2000)
    assert counted.p_value(texts) > 1e-3


async def test_coupled_texts_are_those_of_another_drafter(counted_drafter, spec):
    texts = await counted.texts_of(counted_drafter, partial(spec, max_tokens=24), Rule.COUPLED, 500)
    assert texts == await counted.texts_of(counted.DRAFTERS["drawing"](), spec, Rule.COUPLED, 500)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_rows_of_other_positions_are_noticed(counted_drafter, spec, monkeypatch, rule):
    """Planted: each token goes with the row of the one before it."""
    real = ModelDrafter.draft

    async def shifted(self, batch):
        return [replace(draft, q_rows=draft.q_rows[-1:] + draft.q_rows[:-1]) for draft in await real(self, batch)]

    monkeypatch.setattr(ModelDrafter, "draft", shifted)
    assert counted.p_value(await counted.texts_of(counted_drafter, partial(spec, max_tokens=24), rule, 2000)) < 1e-9


@pytest.mark.parametrize(
    ("config", "wanted", "error", "text"),
    [
        ({"pard_token": 48}, None, ModelNotSupported, "pard_token is 48 in .* one of its token ids, 0 to 47"),
        ({"pard_token": -1}, None, ModelNotSupported, "pard_token is -1"),
        ({"pard_token": "<mask>"}, None, ModelNotSupported, "pard_token is '<mask>'"),
        ({"ptd_token_id": True}, None, ModelNotSupported, "ptd_token_id is True"),
        ({}, True, InvalidRequest, "parallel_drafting is true, and .* has no pard_token"),
    ],
)
def test_what_cannot_be_a_mask_is_refused(tmp_path, config, wanted, error, text):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB, **config}))
    with pytest.raises(error, match=text):
        mask_token(str(tmp_path), wanted)


def test_the_checkpoint_names_the_mask(tmp_path):
    path = tmp_path / "config.json"
    for config, wanted, token in (
        ({"pard_token": 5, "ptd_token_id": 6}, None, 5),
        ({"ptd_token_id": 6}, True, 6),
        ({"pard_token": 5}, False, None),
        ({}, None, None),
    ):
        path.write_text(json.dumps({"vocab_size": VOCAB, **config}))
        assert mask_token(str(tmp_path), wanted) == token


async def test_a_draft_that_was_not_trained_with_its_mask_is_reported(start_parallel, monkeypatch, caplog):
    monkeypatch.setattr(parallel, "check_prompt", lambda folder: PROMPT)
    monkeypatch.setattr("draft_service.drafters.draft_model.check_prompt", lambda folder: PROMPT)
    with caplog.at_level(logging.WARNING):
        async with start_parallel(k=4):
            pass
    (line,) = [record.getMessage() for record in caplog.records if "SELF-TEST FAILED" in record.message]
    assert f"after the mask token {MASK}" in line
    assert "pard_token in config.json is not the id that the draft was trained with" in line
    assert CONTEXT > 64
