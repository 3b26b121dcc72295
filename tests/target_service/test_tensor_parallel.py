"""A target that is split over two processes does what one process does."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import psutil
import pytest
import pytest_asyncio

from engine.engine import Engine
from engine.parallel.ranks import STORE_PORT
from specdec.errors import Unavailable
from specdec.settings import ModelSettings, SchedulerSettings, TargetSettings
from target_service.core import TargetCore
from tests.target_service.conftest import decode, make_prompt, make_spec, multi_step_decode, until_clean, verify
from tests.target_service.test_endings import DEAD_END, EOS, KINDS, chain_after, drafted_text, plain_text
from tests.target_service.test_hidden_states import LAYERS, Reader, stock
from tests.target_service.test_trees import decode_with_trees
from tests.until import until

__all__ = ["stock"]  # a fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")
LOST: list[str] = []


def running_ranks() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if STORE_PORT in child.environ()]


async def to_its_end(session) -> None:
    async with asyncio.timeout(30):
        while True:
            await session.receive()


@pytest.fixture(scope="module")
def settings(checkpoint):
    model = ModelSettings(
        model=checkpoint,
        device="cpu",
        block_size=16,
        num_threads=1,
        kv_cache_memory_bytes=2**20,
        tensor_parallel_size=2,
    )
    return TargetSettings(model=model, scheduler=SchedulerSettings(max_num_batched_tokens=24))


async def beside_each_other(core, plain):
    """Long prompts in chunks, drafts, trees and multi-step decode at once."""

    async def run(seed: int) -> None:
        prompt = make_prompt(seed, 5 + 9 * seed)
        text = plain(prompt, 40)
        session = await core.open(make_spec(prompt, 40, session_id=str(seed)))
        if seed % 3 == 0:
            assert await decode_with_trees(session, text, seed=seed) == text
        elif seed % 3 == 1:
            drafted = await decode(session, k=5, draft=lambda tokens, k: [*text[len(tokens) :][: k - 1], 0][:k])
            assert drafted == text
        else:
            committed = session.first.base_len + 1
            assert (*session.first.token_ids, *await multi_step_decode(session, committed, 39)) == text
        await session.close()

    await asyncio.gather(*(run(seed) for seed in range(8)))
    await until_clean(core)


async def test_sessions_that_lose_their_blocks(settings, plain):
    """All ranks have the same block tables. The pool has room for two or three of the sessions.

    The process can be in one group of ranks at a time: this comes before the others' core.
    """
    model = replace(settings.model, kv_cache_memory_bytes=15 * 2**20 // 512)
    core = await TargetCore.start(replace(settings, model=model))
    try:
        assert core.engine.pool.total_blocks == 14
        await beside_each_other(core, plain)
        assert (await core.load()).preemptions > 0
    finally:
        await core.close()


@pytest.mark.exhaustive
async def test_a_start_that_is_cancelled_leaves_no_rank(settings, monkeypatch):
    warming, loop = asyncio.Event(), asyncio.get_running_loop()
    monkeypatch.setattr(Engine, "warm_up", lambda _: loop.call_soon_threadsafe(warming.set))
    starting = asyncio.create_task(TargetCore.start(settings))
    await warming.wait()
    assert running_ranks()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not running_ranks()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(settings):
    core = await TargetCore.start(settings, on_loss=LOST.append)
    try:
        yield core
    finally:
        await core.close()
        assert not running_ranks()


async def test_each_rank_has_its_share(core, llama):
    cache = core.engine.caches[0][0]
    assert cache.shape[1] == llama.config.num_key_value_heads // 2
    assert (await core.info()).num_parameters == llama.num_parameters()
    assert core.engine.info.execution.endswith("2 ranks")


async def test_an_accepted_end_ends_the_round(core):
    ends = {"stop_token_ids": (EOS,), "logit_bias": {EOS: 9.0}, "ignore_eos": False, "logprobs": 1} | DEAD_END
    for temperature, rule in KINDS:
        spec = make_spec(make_prompt(2), 60, temperature=temperature, rule=rule, min_tokens=3, **ends)
        text = await plain_text(core, spec)
        assert await drafted_text(core, spec, chain_after(text, EOS, 1)) == (text, True)


async def test_sessions_beside_each_other(core, plain):
    await beside_each_other(core, plain)
    assert (await core.load()).preemptions == 0


async def test_seeded_text_is_the_same_with_drafts(core):
    prompt = make_prompt(3, 20)
    texts = []
    for k in (0, 4):
        session = await core.open(make_spec(prompt, 30, temperature=0.9, seed=11, rule="coupled"))
        texts.append(await decode(session, k=k, draft=lambda tokens, k: [(7 * len(tokens) + i) % 64 for i in range(k)]))
        await session.close()
    assert texts[0] == texts[1]


async def test_the_beginning_of_a_prompt_is_reused(core, plain):
    prompt = make_prompt(19, 40)
    session = await core.open(make_spec(prompt, 20))
    text = await decode(session)
    await session.close()
    follow = (*prompt, *text, *make_prompt(20, 9))
    session = await core.open(make_spec(follow, 15))
    assert session.opened.num_cached_tokens == len(prompt) + 19
    assert await decode(session) == plain(follow, 15)
    await session.close()


async def test_hidden_states(core, stock):
    prompt = make_prompt(5, 30)
    session = await core.open(make_spec(prompt, 12, hidden_state_layers=LAYERS))
    reader = Reader(prompt, stock)
    reader.take(session.first)
    while len(reader.tokens) < len(prompt) + 12:
        reader.take(await verify(session, len(reader.tokens)))
    await session.close()


async def test_a_rank_that_dies_ends_all_sessions_at_once(core):
    sessions = [await core.open(make_spec(make_prompt(seed), 200, session_id=str(seed))) for seed in range(2)]
    for session in sessions:
        session.multi_step_decode(session.first.base_len + 1, 190)
        await session.receive()
    (rank,) = running_ranks()
    os.kill(rank.pid, signal.SIGKILL)
    for session in sessions:
        with pytest.raises(Unavailable, match="no longer together"):
            await to_its_end(session)
    await until(lambda: bool(LOST))
    assert "2 ranks of the model are no longer together" in LOST[0]
    with pytest.raises(Unavailable):
        await core.open(make_spec(make_prompt(9), 5))
