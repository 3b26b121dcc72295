"""Which draft sessions are admitted, what makes room for them, and what later ones find."""

import asyncio
from functools import partial

import pytest

from draft_service import core as core_module
from specdec.errors import Overloaded, StaleSession, Unavailable
from tests.draft_service.proposing import propose
from tests.until import until

PROMPT = [3, 14, 15, 9, 26, 5]


async def num_waiting(core):
    return (await core.load()).waiting_sessions


async def test_too_many_sessions_are_refused_soon_with_numbers(start_core, spec):
    async with start_core(scheduler={"max_num_seqs": 2, "max_waiting": 1}) as core:
        sessions = [await core.open(spec(PROMPT, session_id=str(i))) for i in range(2)]
        started = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(core.open(spec(PROMPT)))
        await until(partial(num_waiting, core))
        with pytest.raises(Overloaded, match=r"2 of 2 .* 1 of 1 "):  # the queue is full: at once
            await core.open(spec(PROMPT))
        with pytest.raises(Overloaded, match="2 of 2"):
            await waiting
        assert asyncio.get_running_loop().time() - started < 10
        for session in sessions:
            await session.close()
        assert (await core.load()).waiting_sessions == 0


async def test_a_session_that_ends_lets_the_next_one_in_order(start_core, spec):
    async with start_core(scheduler={"max_num_seqs": 1}) as core:
        first = await core.open(spec(PROMPT))
        order = []

        async def one(number):
            session = await core.open(spec(PROMPT, session_id=str(number)))
            order.append(number)
            await session.close()

        tasks = [asyncio.create_task(one(number)) for number in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[2].cancel()
        await first.close()
        await asyncio.wait(tasks)
        assert order == [0, 1, 3, 4]


async def test_a_full_cache_is_refused_with_numbers(start_core, spec, monkeypatch):
    monkeypatch.setattr(core_module, "ADMISSION_WAIT_S", 0.01)
    async with start_core(model={"kv_cache_memory_bytes": 1 << 18}) as core:
        total = (await core.load()).total_blocks
        texts = [[*PROMPT, *[7] * 60, i] for i in range(total // 3)]
        held = [await core.open(spec(text, session_id=str(i), owner=str(i))) for i, text in enumerate(texts)]
        with pytest.raises(Overloaded, match=rf"of {total} KV blocks are in use"):
            await core.open(spec([1] * 100))
        for session in held:
            await session.close()


async def test_a_session_whose_blocks_do_not_suffice_drafts_nothing_and_others_go_on(start_core, spec, greedy):
    async with start_core(model={"kv_cache_memory_bytes": 1 << 18}) as core:
        total = (await core.load()).total_blocks
        texts = [[*PROMPT, *[7] * 20, number] for number in range(2)]
        large = await core.open(spec([*PROMPT, *[9] * (32 * (total - 2) - 6)], session_id="large"))
        first, second = [await core.open(spec(text, session_id=str(i), owner=str(i))) for i, text in enumerate(texts)]
        more = [3] * 8  # beyond the first block
        assert (await propose(first, 27, more, 4)).token_ids == ()
        assert first.state.cache is None
        assert (await propose(second, 27, more, 4)).token_ids == greedy([*texts[1], *more], 4), "it has those blocks"
        assert (await propose(first, 35, [1], 4)).token_ids == ()
        for session in (large, first, second):
            await session.close()


async def test_draining_refuses_openings_only(start_core, spec):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        core.drain()
        with pytest.raises(Unavailable):
            await core.open(spec(PROMPT))
        assert len((await propose(session, 6, [1], 4)).token_ids) == 4
        await session.close()


async def test_closing_the_core_ends_everything(start_core, spec):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        call = asyncio.create_task(propose(session, 6, [1], 4))
        await asyncio.sleep(0)
        await core.close()
        with pytest.raises(StaleSession):
            await propose(session, 7, [1], 4)
        await asyncio.wait((call,))
        call.exception()


async def test_a_conversation_is_taken_up_where_it_was(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        await propose(session, 6, [1, 2, 3], 4)
        await session.close()
        load = await core.load()
        assert (load.open_sessions, load.used_blocks, load.cached_blocks) == (0, 0, 1)

        conversation = [*PROMPT, 1, 2, 3, 8, 8, 8]
        session = await core.open(spec(conversation))
        assert session.opened.num_cached_tokens == 9  # the drafted tokens' entries are not among them
        assert (await propose(session, 12, [4], 4)).token_ids == greedy([*conversation, 4], 4)
        await session.close()

        for other, salt in (([*conversation[:8], 30, 31], ""), (conversation, "x")):
            session = await core.open(spec(other, cache_salt=salt))
            assert session.opened.num_cached_tokens == (0 if salt else 8)
            assert (await propose(session, len(other), [], 4)).token_ids == greedy(other, 4)
            await session.close()


async def test_a_session_shares_its_prompt_while_it_is_open(start_core, spec, greedy):
    prompt = [(7 * i) % 48 for i in range(70)]
    async with start_core() as core:
        first = await core.open(spec(prompt))
        assert (await propose(first, 70, [1], 4)).token_ids == greedy([*prompt, 1], 4)
        second = await core.open(spec([*prompt, 5]))
        assert second.opened.num_cached_tokens == 64
        for session, text in ((first, [*prompt, 1]), (second, [*prompt, 5])):
            assert (await propose(session, len(text), [2], 4)).token_ids == greedy([*text, 2], 4)
        replaced = [*prompt[:60], 9, 9]
        assert (await propose(first, 60, [9, 9], 4)).token_ids == greedy(replaced, 4)
        assert (await propose(second, 72, [3], 4)).token_ids == greedy([*prompt, 5, 2, 3], 4)
        await first.close()
        await second.close()


async def test_it_can_be_switched_off(start_core, spec):
    async with start_core(scheduler={"enable_prefix_caching": False}) as core:
        for _ in range(2):
            session = await core.open(spec([5] * 40))
            assert session.opened.num_cached_tokens == 0
            await session.close()
        assert (await core.load()).cached_blocks == 0


async def test_what_is_cached_makes_room(start_core, spec, greedy):
    async with start_core(model={"kv_cache_memory_bytes": 1 << 18}) as core:
        for i in range(30):  # far more than fit at once
            text = [*PROMPT, *[i] * 60]
            session = await core.open(spec(text, session_id=str(i)))
            assert (await propose(session, 66, [1], 4)).token_ids == greedy([*text, 1], 4)
            await session.close()
        load = await core.load()
        assert load.used_blocks == 0
        assert load.cached_blocks >= load.total_blocks - 2
