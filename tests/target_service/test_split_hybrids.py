"""A hybrid that is split over two processes: sessions lose states, prompts are taken up, a rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch

from specdec.errors import Unavailable
from specdec.settings import ModelSettings, SchedulerSettings, TargetSettings
from target_service.core import TargetCore
from tests.hybrids import KINDS, build_hybrid
from tests.llamas import greedy_text
from tests.target_service.conftest import decode, make_prompt, make_spec, multi_step_decode, until_clean
from tests.target_service.test_preemption import TakesBlocksAtRandom
from tests.target_service.test_tensor_parallel import running_ranks, to_its_end

NUM_TOKENS = 40


async def text_of(core, seed, wanted, cached=0):
    """Rounds of which some tokens are rejected, or steps without drafts."""
    prompt = make_prompt(seed, 20 + 9 * seed)
    session = await core.open(make_spec(prompt, NUM_TOKENS, session_id=str(seed)))
    assert session.opened.num_cached_tokens >= cached
    if seed % 3:
        text = await decode(session, k=5, draft=lambda tokens, k: [*wanted[len(tokens) :][: k - 2], 0, 1][:k])
    else:
        committed = session.first.base_len + 1
        text = (*session.first.token_ids, *await multi_step_decode(session, committed, NUM_TOKENS - 1))
    await session.close()
    return text


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
async def test_a_split_hybrid(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("target_service.core.SequenceMemory", TakesBlocksAtRandom)
    torch.set_num_threads(1)
    model, lost = build_hybrid(kind), []
    model.save_pretrained(tmp_path)
    wanted = [tuple(greedy_text(model, make_prompt(seed, 20 + 9 * seed), NUM_TOKENS)) for seed in range(6)]
    options = ModelSettings(
        model=str(tmp_path),
        device="cpu",
        block_size=16,
        num_threads=1,
        tensor_parallel_size=2,
        kv_cache_memory_bytes=2**19,
    )
    settings = TargetSettings(model=options, scheduler=SchedulerSettings(max_num_batched_tokens=24))
    core = await TargetCore.start(settings, on_loss=lost.append)
    try:
        assert core.engine.info.execution.endswith("2 ranks")
        assert await text_of(core, 5, wanted[5]) == wanted[5]
        assert await text_of(core, 5, wanted[5], cached=48) == wanted[5]
        assert await asyncio.gather(*(text_of(core, seed, wanted[seed]) for seed in range(6))) == wanted
        assert (await core.load()).preemptions > 0
        await until_clean(core)
        session = await core.open(make_spec(make_prompt(1), 200))
        session.multi_step_decode(session.first.base_len + 1, 190)
        await session.receive()
        os.kill(running_ranks()[0].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="no longer together"):
            await to_its_end(session)
        assert "2 ranks of the model are no longer together" in lost[0]
    finally:
        await core.close()
        assert not running_ranks()
