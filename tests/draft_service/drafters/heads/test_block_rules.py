"""Heads that draft a block under every rule: the real verifier, a Markov target, every text counted.

The states are made up, a function of the token at their position.
"""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from draft_service.drafters.base import DraftJob
from draft_service.drafters.heads.base import LoadedHead
from draft_service.drafters.heads.dflash import DFlashDrafter
from engine.device_thread import DeviceThread
from engine.heads import dspark
from engine.heads.blocks import PagedBlocks
from engine.heads.dflash import DFlashConfig, DFlashHead, Reach
from engine.heads.dflash2 import DFlash2Config, DFlash2Head
from engine.heads.dspark import DSparkConfig, DSparkHead
from engine.sampling.sparse import unpack
from specdec.rules import Rule
from specdec.settings import DraftSettings, ModelSettings, SpeculativeSettings
from specdec.types import HiddenStates, ModelInfo
from tests.draft_service.drafters import test_lookup_rules as counted
from tests.draft_service.drafters.test_draft_model import chi_square
from tests.engine.heads.random_heads import layer_config, shaken

#: Four tokens of a text, padding, and a mask.
VOCAB, MASK, FEATURES = 8, 7, 2 * 12
STATES = torch.randn(VOCAB, FEATURES, generator=torch.Generator().manual_seed(5)).numpy()
SHAPE = {
    "layer": layer_config(qk_norm=True),
    "reaches": (Reach(is_causal=True, window=9), Reach()),
    "target_hidden_size": 12,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "hidden_state_layers": (1, 2),
    "block_size": 5,
    "mask_token_id": MASK,
    "owns_embeddings": True,
    "owns_lm_head": True,
}
HEADS = {
    "dflash": lambda: DFlashHead(DFlashConfig(**SHAPE)),
    "dflash2": lambda: DFlash2Head(DFlash2Config(**SHAPE, selector_rank=6, selector_top_k=6, softcap=1.5)),
    **{
        kind: partial(
            lambda kind: DSparkHead(
                DSparkConfig(
                    **SHAPE,
                    predicts_next=True,
                    markov_rank=6,
                    markov_type=kind,
                    has_confidence=True,
                    confidence_reads_token=True,
                )
            ),
            kind,
        )
        for kind in dspark.MARKOV_TYPES
    },
}


class OnStates(DFlashDrafter):
    """Gets the states of all committed tokens but the last."""

    def open(self, spec):
        state = super().open(spec)
        super().advance(state, len(spec.token_ids), (), [rows_of(spec.token_ids, 0)])
        return state

    def advance(self, state, keep, token_ids, hidden_states=()):
        tokens = [*state.token_ids[:keep], *token_ids]
        super().advance(state, keep, token_ids, [rows_of(tokens, keep - 1)])


def rows_of(tokens, start):
    rows = STATES[list(tokens[start:-1])].astype(np.float32)
    return HiddenStates(start, FEATURES, "float32", rows.tobytes())


@pytest.fixture
async def start_head():
    started = []

    async def start(kind, least=0.0, *, in_torch=False):
        head = shaken(HEADS[kind]())
        if isinstance(head, DSparkHead):  # let the token before decide about the confidence
            head.confidence_head.proj.weight[:, : -head.config.markov_rank] *= 0.1
            head.confidence_head.proj.bias.zero_()
        model = ModelSettings(model="head", num_threads=1, kv_cache_memory_bytes=1 << 24, enforce_eager=in_torch)
        settings = DraftSettings(
            speculative=SpeculativeSettings(model="head", method=head.method, num_speculative_tokens=3),
            model=model,
            target_model="target",
        )
        info = ModelInfo(
            name=kind,
            method=head.method,
            vocab_size=VOCAB,
            tokenizer_size=counted.V,
            max_model_len=64,
            num_speculative_tokens=3,
            hidden_state_layers=head.hidden_state_layers,
            dtype="float32",
        )
        thread = DeviceThread()
        blocks = await thread.run(lambda: PagedBlocks(head, model, 64, num_tokens=3, least_confidence=least))
        drafter = OnStates(
            LoadedHead(head, torch.device("cpu"), model, info, lambda: head, bytes), blocks, thread, settings
        )
        started.append(drafter)
        return drafter

    yield start
    for drafter in started:
        await drafter.shutdown()


@pytest.mark.parametrize(
    ("kind", "rule", "in_torch"),
    [
        ("dflash", Rule.TOKEN, False),
        ("dflash2", Rule.BLOCK, False),
        ("rnn", Rule.TOKEN, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("dflash", Rule.BLOCK, True),
                ("vanilla", Rule.BLOCK, False),
                ("gated", Rule.TOKEN, False),
                ("rnn", Rule.BLOCK, False),
            ]
        ),
    ],
)
async def test_ratio_rules_keep_the_targets_distribution(start_head, spec, kind, rule, in_torch):
    texts = await counted.texts_of(await start_head(kind, in_torch=in_torch), partial(spec, max_tokens=24), rule, 2000)
    assert counted.p_value(texts) > 1e-3


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
async def test_coupled_texts_are_those_of_another_drafter(start_head, spec, kind):
    texts = await counted.texts_of(await start_head(kind), partial(spec, max_tokens=24), Rule.COUPLED, 500)
    assert texts == await counted.texts_of(counted.DRAFTERS["drawing"](), spec, Rule.COUPLED, 500)


@pytest.mark.parametrize(("kind", "rule"), [("dflash", Rule.BLOCK), ("gated", Rule.TOKEN)])
async def test_rows_of_other_positions_are_noticed(start_head, spec, monkeypatch, kind, rule):
    """Planted: each token goes with the row of the one before it."""
    real = DFlashDrafter.draft

    async def shifted(self, batch):
        return [replace(draft, q_rows=draft.q_rows[-1:] + draft.q_rows[:-1]) for draft in await real(self, batch)]

    monkeypatch.setattr(DFlashDrafter, "draft", shifted)
    texts = await counted.texts_of(await start_head(kind), partial(spec, max_tokens=24), rule, 2000)
    assert counted.p_value(texts) < 1e-9


@pytest.fixture
def lengths(monkeypatch):
    """Lengths of the chains that confidences have cut."""
    found = Counter()
    real = DFlashDrafter.draft

    async def counting(self, batch):
        drafts = await real(self, batch)
        found.update(len(draft.token_ids) for draft, job in zip(drafts, batch, strict=True) if job.num_tokens)
        return drafts

    monkeypatch.setattr(DFlashDrafter, "draft", counting)
    return found


@pytest.mark.parametrize("rule", [pytest.param(Rule.TOKEN, marks=pytest.mark.exhaustive), Rule.BLOCK])
async def test_chains_that_end_before_an_unsure_token(start_head, spec, lengths, rule):
    head = await start_head("rnn", 0.5, in_torch=rule is Rule.TOKEN)
    texts = await counted.texts_of(head, partial(spec, max_tokens=24), rule, 2000)
    assert min(lengths[length] for length in range(4)) > 100
    assert counted.p_value(texts) > 1e-3


async def test_chains_that_end_at_the_token_that_was_drawn_are_noticed(start_head, spec, monkeypatch):
    """Planted: the confidence that is looked at has read the token itself."""
    real = DFlashDrafter.draft

    async def shorter(self, batch):
        drafts = await real(self, batch)
        cut = [replace(draft, token_ids=draft.token_ids[:-1], q_rows=draft.q_rows[:-1]) for draft in drafts]
        return [draft if len(draft.token_ids) == 3 else less for draft, less in zip(drafts, cut, strict=True)]

    monkeypatch.setattr(DFlashDrafter, "draft", shorter)
    texts = await counted.texts_of(await start_head("rnn", 0.5), partial(spec, max_tokens=24), Rule.BLOCK, 2000)
    assert counted.p_value(texts) < 1e-9


@pytest.mark.parametrize(
    ("case", "in_torch"),
    [  # each head in one of the two ways, and in both in the exhaustive run
        pytest.param(case, in_torch, marks=() if i % 2 == in_torch else pytest.mark.exhaustive)
        for i, case in enumerate([*((kind, 256) for kind in HEADS), ("gated", 3)])
        for in_torch in (False, True)
    ],
    ids=str,
)
async def test_rows_are_what_tokens_were_drawn_from(start_head, spec, monkeypatch, case, in_torch):
    """χ² of the second token, for each first one; no other than a candidate is drafted."""
    kind, num_candidates = case
    monkeypatch.setattr(dspark, "NUM_CANDIDATES", num_candidates)
    drafter = await start_head(kind, in_torch=in_torch)
    counts, rows = {}, {}
    for seed in range(0, 3000, 500):
        openings = [
            spec(counted.PROMPT, rule=Rule.TOKEN, temperature=1.0, seed=seed + i, session_id=str(i), max_tokens=8)
            for i in range(500)
        ]
        states = [drafter.open(opening) for opening in openings]
        jobs = [DraftJob(state, state.num_pending, 2) for state in states]
        for draft in await drafter.draft(jobs):
            first, second = draft.token_ids
            counts.setdefault(first, Counter())[second] += 1
            rows.setdefault(first, set()).add(draft.q_rows[1])
        for state in states:
            drafter.close(state)
        await asyncio.sleep(0)
    assert len(counts) > 1
    for first, seen in counts.items():
        (row,) = rows[first]
        assert chi_square(seen, row, sum(seen.values())) > 1e-4
        most = {"dflash": counted.V, "dflash2": 6}.get(kind, num_candidates)
        assert len(unpack(row)[0]) <= min(counted.V, most)
    assert (len({row for of in rows.values() for row in of}) == 1) == (kind == "dflash")
