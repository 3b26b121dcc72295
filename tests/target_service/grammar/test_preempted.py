"""A grammar goes on where it was when its session has lost its blocks."""

from __future__ import annotations

import random

import pytest

from specdec.rules import Rule
from specdec.settings import ModelSettings, TargetSettings
from specdec.types import Proposal
from target_service.core import TargetCore
from tests.target_service.conftest import make_spec
from tests.target_service.grammar.conftest import MODEL
from tests.target_service.grammar.test_forced import LANGUAGE, NUM_TOKENS
from tests.target_service.test_preemption import TakesBlocksAtRandom


async def texts_of(tokenizer, given) -> tuple[list[tuple[int, ...]], int]:
    """By multi-step decode and by rounds of drafts that are partly wrong; and how often blocks were lost."""
    prompt = tuple(tokenizer.encode("DATA = json.loads('").ids)
    model = ModelSettings(model=str(MODEL), device="cpu", dtype="float32", num_threads=1, kv_cache_memory_bytes=2**25)
    core = await TargetCore.start(TargetSettings(model=model))
    texts = []
    try:
        for in_rounds in (False, True):
            session = await core.open(make_spec(prompt, NUM_TOKENS, structured_outputs=LANGUAGE, seed=7, **given))
            tokens, verdict = [*session.first.token_ids], session.first
            rng = random.Random(1)
            while verdict.finish_reason is None:
                n = session.committed_len
                if in_rounds:
                    text = texts[0][len(tokens) :][: rng.randint(0, 5)]
                    session.offer(Proposal(1, n, (*text, *rng.sample(range(100), rng.randint(0, 1)))))
                else:
                    session.multi_step_decode(n, 5)
                verdict = await session.receive()
                tokens += verdict.token_ids
                while not in_rounds and verdict.finish_reason is None and verdict.num_multi_step_left:
                    verdict = await session.receive()
                    tokens += verdict.token_ids
            texts.append(tuple(tokens))
            await session.close()
        return texts, core.memory.num_preemptions
    finally:
        await core.close()


@pytest.mark.parametrize("given", [{}, {"temperature": 0.9, "rule": Rule.COUPLED}], ids=["greedy", "seeded"])
async def test_the_text_is_the_same(tokenizer, monkeypatch, given):
    expected, num_preemptions = await texts_of(tokenizer, given)
    assert expected[0] == expected[1]
    assert num_preemptions == 0
    monkeypatch.setattr("target_service.core.SequenceMemory", TakesBlocksAtRandom)
    texts, num_preemptions = await texts_of(tokenizer, given)
    assert texts == expected
    assert num_preemptions > 0
