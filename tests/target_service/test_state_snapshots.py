"""Prompts of hybrids that begin alike are computed from where states are kept, to the same text."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from specdec.settings import ModelSettings, SchedulerSettings, TargetSettings
from target_service.core import TargetCore
from tests.hybrids import KINDS, build_hybrid
from tests.llamas import greedy_text
from tests.target_service.conftest import decode, make_prompt, make_spec, until_clean
from tests.target_service.scheduler.watch import Watch


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    torch.set_num_threads(1)
    model = build_hybrid(request.param)
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.fixture
def start(model):
    @asynccontextmanager
    async def start(**scheduler):
        options = ModelSettings(model=model[1], device="cpu", dtype="float32", block_size=16, num_threads=1)
        core = await TargetCore.start(TargetSettings(model=options, scheduler=SchedulerSettings(**scheduler)))
        try:
            yield core
            await until_clean(core)
        finally:
            await core.close()

    return start


async def text_of(core, prompt, num_tokens, model, cached):
    """What a session answers, with rounds of which some tokens are rejected; it is what transformers answers."""
    wanted = greedy_text(model[0], prompt, num_tokens)
    session = await core.open(make_spec(prompt, num_tokens))
    assert session.opened.num_cached_tokens == cached
    text = await decode(session, k=4, draft=lambda tokens, k: (*wanted[len(tokens) :][: k - 2], 7, 8)[:k])
    assert text == tuple(wanted)
    await session.close()
    return text


async def test_a_prompt_serves_many_from_the_second_time_on(start, model):
    prompt = make_prompt(1, 70)
    async with start(max_num_batched_tokens=48) as core:
        text = await text_of(core, prompt, 9, model, 0)
        for _ in range(3):  # the same again, and one that diverges in the last block of the prompt
            await text_of(core, prompt, 9, model, 64)
            await text_of(core, (*prompt[:66], 1, 2, 3), 9, model, 64)
        follow = (*prompt, *text, *make_prompt(2, 9))
        await text_of(core, follow, 12, model, len(prompt) + 8)  # the last token was never fed
        await text_of(core, follow, 12, model, (len(follow) - 1) // 16 * 16)


@pytest.mark.parametrize(("num_own", "cached"), [(60, (0, 100, 100, 100)), (80, (0, 0, 96, 96))])
async def test_what_prompts_have_in_common(start, model, num_own, cached):
    """Short ones go back from the end of the first. Of long ones the second finds out where they part, and keeps the
    states there.
    """
    system = make_prompt(3, 100)
    async with start(max_num_batched_tokens=512) as core:
        for number, found in enumerate(cached):
            await text_of(core, (*system, *make_prompt(10 + number, num_own)), 8, model, found)


@pytest.mark.parametrize("parts", [0, 1, 15, 16, 17, 31, 33, 63, 65, 80, 81])
async def test_at_every_offset_around_a_snapshot(start, model, parts):
    prompt = make_prompt(4, 80)
    async with start(max_num_batched_tokens=64) as core:
        await (await core.open(make_spec(prompt, 4))).close()
        other = (*prompt[:parts], *make_prompt(5, 90 - parts))
        wanted = greedy_text(model[0], other, 8)
        for _ in range(3):
            session = await core.open(make_spec(other, 8))
            assert session.opened.num_cached_tokens <= max(parts, 89)
            assert await decode(session) == tuple(wanted)
            await session.close()
        assert session.opened.num_cached_tokens == 80


async def test_a_long_prompt_keeps_states_on_its_way(start, model, monkeypatch):
    monkeypatch.setattr("target_service.session.session.MIN_SNAPSHOT_INTERVAL", 64)
    prompt = make_prompt(6, 300)
    async with start(max_num_batched_tokens=32) as core:
        states = core.engine.pool.states
        free = states.num_free
        session = await core.open(make_spec(prompt, 4))
        assert free - states.num_free == 1 + 5, "its own, and one for 64 tokens from 32 on; the last is that of the end"
        await session.close()
        await text_of(core, (*prompt[:200], *make_prompt(7, 9)), 6, model, 200)


async def test_prompts_that_arrive_together_are_computed_once(start, model):
    prompt = make_prompt(8, 90)
    wanted = tuple(greedy_text(model[0], prompt, 6))
    async with start(max_num_batched_tokens=256) as core:
        watch = Watch(core)
        sessions = await asyncio.gather(*(core.open(make_spec(prompt, 6)) for _ in range(5)))
        assert sum(rows for batch in watch.batches for rows, _ in batch) <= 90 + 4 * (90 - 80) + 5
        for session in sessions:
            assert await decode(session) == wanted
            await session.close()
