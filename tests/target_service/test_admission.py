"""Waiting for a place: order, limits, and leaving the queue."""

import asyncio
import time
from dataclasses import replace

import pytest

from specdec.errors import InvalidRequest, Overloaded
from tests.target_service.conftest import make_prompt, make_spec, num_waiting, until_clean
from tests.until import until


async def test_sessions_wait_for_their_place(start_core):
    async with start_core(max_num_seqs=1) as core:
        order = []

        async def run(name):
            session = await core.open(make_spec(make_prompt(0), 4))
            order.append(name)
            await session.close()

        first = await core.open(make_spec(make_prompt(0), 4))
        tasks = []
        for name in range(4):
            tasks.append(asyncio.create_task(run(name)))
            await asyncio.sleep(0)
        assert (await core.load()).waiting_sessions == 4
        assert (await core.load()).open_sessions == 1
        await first.close()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3]


async def test_a_large_session_is_not_overtaken(start_core):
    async with start_core(kv_blocks=10) as core:
        one = await core.open(make_spec(make_prompt(0, 84), 4))  # 6 blocks of 16
        large = asyncio.create_task(core.open(make_spec(make_prompt(1, 140), 4)))  # 9 blocks
        await until(lambda: num_waiting(core))
        small = asyncio.create_task(core.open(make_spec(make_prompt(2), 4)))
        await asyncio.sleep(0)
        assert await num_waiting(core) == 2
        large.cancel()
        await asyncio.gather(large, return_exceptions=True)
        session = await small  # the one it stood behind is gone
        await session.close()
        await one.close()


async def test_a_full_queue_is_refused_with_numbers(start_core):
    async with start_core(max_num_seqs=2, max_waiting=1, kv_blocks=32) as core:
        sessions = [await core.open(make_spec(make_prompt(seed), 4)) for seed in range(2)]
        waiting = asyncio.create_task(core.open(make_spec(make_prompt(3), 4)))
        await asyncio.sleep(0)
        with pytest.raises(
            Overloaded, match="2 of 2 sessions open, 2 of 32 KV blocks in use; the queue is full: 1 of 1"
        ):
            await core.open(make_spec(make_prompt(4), 4))
        await sessions[0].close()
        await (await waiting).close()
        await sessions[1].close()


async def test_waiting_has_an_end(start_core):
    async with start_core(max_num_seqs=1, max_wait_s=0.05) as core:
        session = await core.open(make_spec(make_prompt(0), 4))
        with pytest.raises(Overloaded, match=r"no slot came free within 0\.05 s"):
            await core.open(make_spec(make_prompt(1), 4))
        await session.close()
        await (await core.open(make_spec(make_prompt(1), 4))).close()


async def test_what_never_fits_is_refused_at_once(start_core):
    async with start_core(kv_blocks=10) as core:
        with pytest.raises(InvalidRequest, match="context of 160"):
            await core.open(make_spec(make_prompt(0, 165), 4))
        session = await core.open(make_spec(make_prompt(0), 250))
        assert session.step_session.stop_criteria.max_len == 160
        await session.close()


async def test_cancelled_while_waiting(start_core):
    async with start_core(max_num_seqs=1) as core:
        session = await core.open(make_spec(make_prompt(0), 4))
        waiting = [asyncio.create_task(core.open(make_spec(make_prompt(1), 4))) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.sleep(0)
        assert (await core.load()).waiting_sessions == 2
        await session.close()
        await (await waiting[0]).close()
        await (await waiting[2]).close()


async def test_cancelled_in_the_very_moment_of_admission(start_core):
    async with start_core(max_num_seqs=1) as core:
        session = await core.open(make_spec(make_prompt(0), 4))
        waiting = asyncio.create_task(core.open(make_spec(make_prompt(1), 4)))
        await asyncio.sleep(0)
        session.end()  # admits the waiting one; its task has not run yet
        assert (await core.load()).open_sessions == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until_clean(core)
        await (await core.open(make_spec(make_prompt(1), 4))).close()


async def test_cancelled_just_before_a_place_comes_free(start_core):
    async with start_core(max_num_seqs=1) as core:
        session = await core.open(make_spec(make_prompt(0), 4))
        gone, next_one = (asyncio.create_task(core.open(make_spec(make_prompt(1), 4))) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        session.end()  # before the cancelled task has run
        await (await next_one).close()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await until_clean(core)


async def test_the_wait_is_reported(start_core):
    async with start_core(max_num_seqs=1) as core:
        session = await core.open(make_spec(make_prompt(0), 4))
        waiting = asyncio.create_task(core.open(make_spec(make_prompt(1), 4)))
        await until(lambda: num_waiting(core))
        waiting_ns = time.perf_counter_ns()
        await asyncio.sleep(0.005)  # what is measured
        closed_ns = time.perf_counter_ns()
        await session.close()
        second = await waiting
        assert second.opened.queue_ns >= closed_ns - waiting_ns
        assert 0 < second.opened.prefill_ns < time.perf_counter_ns() - closed_ns
        await second.close()


async def test_a_client_holds_no_more_than_its_share_of_the_cache(start_core):
    async with start_core(kv_blocks=10) as core:
        tasks = []

        def ask(client, max_tokens=20):  # two blocks of 16 for the prompt
            spec = make_spec(make_prompt(len(tasks), 30), max_tokens)
            tasks.append(asyncio.create_task(core.open(replace(spec, client=client, max_kv_share=0.5))))
            return tasks[-1]

        mine = [ask("greedy") for _ in range(4)]
        await asyncio.wait(mine[:2])
        other = await ask("other")
        assert [task.done() for task in mine] == [True, True, False, False]
        with pytest.raises(InvalidRequest, match="needs 8 KV blocks and its client may hold 5 of 10"):
            await ask("greedy", max_tokens=84)
        await mine[0].result().close()
        await mine[2]
        assert not mine[3].done()
        for session in (mine[1].result(), mine[2].result(), other):
            await session.close()
        await (await mine[3]).close()
