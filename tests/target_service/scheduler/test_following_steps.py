"""Steps of multi-step decode that the device thread runs one after another, without the event loop."""

import asyncio
import time

import pytest

from specdec.errors import InternalError
from target_service.session.session import Session
from tests.target_service.conftest import make_prompt, make_spec, multi_step_decode, until_clean
from tests.target_service.scheduler.watch import Watch
from tests.until import until


async def test_multi_step_decode_does_not_wait_for_the_event_loop(start_core, plain):
    prompt = make_prompt(7, 17)  # the next 15 tokens need no other block
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 40))
        watch = Watch(core)
        watch.gate.clear()
        fetch = asyncio.create_task(multi_step_decode(session, session.first.committed_len, 39))
        await until(lambda: watch.batches)
        held_at = len(watch.batches)
        watch.gate.set()
        deadline = time.monotonic() + 5
        while len(watch.batches) < held_at + 10 and time.monotonic() < deadline:
            time.sleep(0.001)  # noqa: ASYNC251 (the event loop is held up)
        assert len(watch.batches) >= held_at + 10
        assert (*session.first.token_ids, *await fetch) == plain(prompt, 40)
        await session.close()


async def test_a_session_joins_multi_step_decode_at_the_next_step(start_core, plain):
    async with start_core() as core:
        first = await core.open(make_spec(make_prompt(1), 200))
        watch = Watch(core)
        watch.delay_s = 0.005
        fetch = asyncio.create_task(multi_step_decode(first, first.first.committed_len, 199))
        await until(lambda: len(watch.batches) >= 5)
        at = len(watch.batches)
        second = await core.open(make_spec(make_prompt(2), 4))
        joined = next(i for i, batch in enumerate(watch.batches) if len(batch) > 1)
        assert joined - at <= 4  # at once, but for what the opening itself takes
        watch.delay_s = 0.0
        assert (*first.first.token_ids, *await fetch) == plain(make_prompt(1), 200)
        await first.close()
        await second.close()


async def test_a_failing_step_loses_no_token_before_it(start_core, plain):
    prompt = make_prompt(3)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 60))
        watch = Watch(core)
        watch.delay_s = 0.001
        session.multi_step_decode(session.first.committed_len, 59)
        tokens = list(session.first.token_ids)
        while len(watch.batches) <= 10:
            tokens += (await session.receive()).token_ids
        watch.error = RuntimeError("broken")
        with pytest.raises(InternalError, match="a step failed: broken"):  # noqa: PT012 (several verdicts may wait)
            while True:
                tokens += (await session.receive()).token_ids
        assert len(tokens) == len(watch.batches)  # the first token came before the watch, the last step brought none
        assert tuple(tokens) == plain(prompt, len(tokens))
        await session.close()


async def test_closing_in_the_middle_of_multi_step_decode(start_core):
    async with start_core() as core:
        session = await core.open(make_spec(make_prompt(4), 200))
        watch = Watch(core)
        watch.delay_s = 0.002
        session.multi_step_decode(session.first.committed_len, 199)
        await until(lambda: len(watch.batches) >= 3)
        await session.close()
        await until_clean(core)
        assert len(watch.batches) < 20


@pytest.mark.parametrize("method", ["continue_step", "finish_step"])
async def test_a_session_that_cannot_take_a_result_fails_alone(start_core, plain, monkeypatch, caplog, method):
    prompts = [make_prompt(seed) for seed in range(3)]
    original, at = getattr(Session, method), 5 if method == "continue_step" else 1
    num_calls = 0

    def flawed(session, *args):
        nonlocal num_calls
        num_calls += session is sessions[1]
        if session is sessions[1] and num_calls == at:
            raise ValueError("a flaw")
        original(session, *args)

    async with start_core() as core:
        sessions = [await core.open(make_spec(prompt, 20)) for prompt in prompts]
        monkeypatch.setattr(Session, method, flawed)
        for session in sessions:
            session.multi_step_decode(session.first.committed_len, 19)
        texts = [list(session.first.token_ids) for session in sessions]
        async with asyncio.timeout(10):
            for i in (0, 2):
                while len(texts[i]) < 20:
                    texts[i] += (await sessions[i].receive()).token_ids
                assert tuple(texts[i]) == plain(prompts[i], 20)
        with pytest.raises(InternalError, match="a step failed: a flaw"):  # noqa: PT012 (tokens before it may wait)
            while True:
                texts[1] += (await sessions[1].receive()).token_ids
        assert tuple(texts[1]) == plain(prompts[1], 20)[: len(texts[1])]
        assert len(texts[1]) < 20
        assert "a session could not take the result" in caplog.text
        for session in sessions:
            await session.close()


async def test_two_sessions_close_while_a_following_step_runs(start_core, plain):
    """Their caches stay until the step ends; the third session decodes on."""
    async with start_core() as core:
        sessions = [await core.open(make_spec(make_prompt(seed), 30)) for seed in range(3)]
        watch = Watch(core)
        watch.delay_s = 0.001
        for session in sessions:
            session.multi_step_decode(session.first.committed_len, 29)
        await until(lambda: len(watch.batches) >= 4)
        watch.gate.clear()
        passes = len(watch.batches)
        await until(lambda: len(watch.batches) > passes)
        in_use = core.engine.pool.used_blocks
        for session in sessions[:2]:
            session.end()
        await asyncio.sleep(0)
        assert core.engine.pool.used_blocks == in_use
        watch.gate.set()
        for session in sessions[:2]:
            await session.close()
        assert core.engine.pool.used_blocks == in_use // 3
        tokens = list(sessions[2].first.token_ids)
        while len(tokens) < 30:
            tokens += (await sessions[2].receive()).token_ids
        assert tuple(tokens) == plain(make_prompt(2), 30)
        assert [len(batch) for batch in watch.batches[-3:]] == [1] * 3
        await sessions[2].close()
        assert len(watch.batches) <= 30


async def test_tokens_gather_while_further_ones_come_in_time(start_core, plain):
    prompt = make_prompt(5)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 107))
        session.multi_step_decode(session.first.committed_len, 6)
        async with asyncio.timeout(10):
            together = await session.receive(time.perf_counter_ns() + 10**12)
        assert together.token_ids == plain(prompt, 107)[1:7]
        watch = Watch(core)
        watch.delay_s = 0.002
        session.multi_step_decode(session.committed_len, 100)
        await until(lambda: len(watch.batches) >= 2)
        watch.gate.clear()
        async with asyncio.timeout(10):  # the next token does not come
            early = await session.receive(time.perf_counter_ns() + 50_000_000)
        assert 1 <= len(early.token_ids) < 100
        watch.delay_s = 0.0
        watch.gate.set()
        tokens = list(early.token_ids)
        while len(tokens) < 100:
            tokens += (await session.receive(time.perf_counter_ns() + 10**12)).token_ids
        assert tuple(tokens) == plain(prompt, 107)[7:]
        await session.close()
