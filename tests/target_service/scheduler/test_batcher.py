"""Many sessions at once: one forward pass per step, prompts in fair chunks, nothing left behind by those who leave."""

import asyncio
from functools import partial

import pytest

from specdec.errors import InternalError, TandemError, Unavailable
from specdec.types import FinishReason, Proposal
from target_service.scheduler import round_coalescer
from target_service.scheduler.batcher import StepBatcher
from target_service.scheduler.composition import MIN_CHUNK, prefill_room, share_prefill, take_rounds
from target_service.session.session import Session
from target_service.stop_criteria import StopCriteria, Truncation
from tests.target_service.conftest import (
    decode,
    make_prompt,
    make_spec,
    multi_step_decode,
    num_waiting,
    until_clean,
    verify,
)
from tests.target_service.scheduler.watch import Watch
from tests.until import until


@pytest.mark.parametrize("budget", [512, 48])
async def test_many_sessions_in_ragged_batches_are_the_stock_model(start_core, plain, budget):
    async with start_core(max_num_batched_tokens=budget) as core:
        watch = Watch(core)

        async def run(seed):
            prompt = make_prompt(seed, 3 + 17 * (seed % 5))
            right = lambda output, k: plain(prompt, len(output) + k)[len(output) :]  # noqa: E731
            session = await core.open(make_spec(prompt, 20, multi_step_tokens=5 if seed % 4 == 3 else 0))
            try:
                if seed % 4 == 3:
                    n = session.first.committed_len
                    tokens = await multi_step_decode(session, n, 19)
                    assert (*session.first.token_ids, *tokens) == plain(prompt, 20)
                else:
                    draft = right if seed % 4 else None
                    assert await decode(session, k=seed % 4, draft=draft) == plain(prompt, 20)
            finally:
                await session.close()

        for seed in range(12):  # the stock model is slow: ask it beforehand
            plain(make_prompt(seed, 3 + 17 * (seed % 5)), 20)
        await asyncio.gather(*(run(seed) for seed in range(12)))
        assert len(watch.batches) == core.num_steps
        assert max(len(batch) for batch in watch.batches) >= 4
        assert max(sum(rows for rows, _ in batch) for batch in watch.batches) <= budget


async def test_one_step_is_one_forward_pass(start_core):
    async with start_core() as core:
        sessions = [await core.open(make_spec(make_prompt(seed), 30)) for seed in range(6)]
        watch = Watch(core)
        steps = core.num_steps
        n = sessions[0].first.committed_len
        verdicts = await asyncio.gather(*(verify(session, n, Proposal(1, n, (1, 2, 3))) for session in sessions))
        assert core.num_steps - steps == len(watch.batches) == 1
        assert watch.batches[0] == [(4, 4)] * 6
        assert {(v.timings.batch_sessions, v.timings.batch_rows) for v in verdicts} == {(6, 24)}
        for session in sessions:
            await session.close()


async def test_a_long_prompt_is_fed_in_chunks_beside_rounds_and_short_prompts(start_core):
    async with start_core(max_num_batched_tokens=64) as core:
        decoding = await core.open(make_spec(make_prompt(0), 100))
        watch = Watch(core)
        watch.gate.clear()
        order = []

        async def run(name, length):
            session = await core.open(make_spec(make_prompt(length, length), 4))
            order.append(name)
            await session.close()

        fetch = asyncio.create_task(multi_step_decode(decoding, decoding.first.committed_len, 90))
        long = asyncio.create_task(run("long", 200))
        await until(lambda: watch.batches)
        short = asyncio.create_task(run("short", 5))
        await asyncio.sleep(0)
        watch.gate.set()
        await asyncio.gather(fetch, long, short)
        assert order == ["short", "long"]  # it came later and did not wait
        with_chunk = [batch for batch in watch.batches if len(batch) > 1]
        assert all(batch[0] == (1, 1) for batch in with_chunk)  # a round in every step
        assert all(sum(rows for rows, _ in batch) <= 64 for batch in with_chunk)
        chunks = [entry for batch in with_chunk for entry in batch[1:]]
        assert sum(rows for rows, _ in chunks) == 205
        assert sum(logits for _, logits in chunks) == 2  # only the last row of each prompt
        await decoding.close()


async def test_an_idle_batcher_sleeps(start_core):
    async with start_core() as core:
        session = await core.open(make_spec(make_prompt(0), 30))
        steps = core.num_steps
        await asyncio.sleep(0.02)  # no event tells of steps that do not come
        assert core.num_steps == steps
        await session.close()


async def test_two_hundred_sessions_leave_nothing(start_core):
    async with start_core(max_num_seqs=16, kv_blocks=64) as core:

        async def run(seed):
            session = await core.open(make_spec(make_prompt(seed % 50, 5 + seed % 30), 6, owner="ab"[seed % 2]))
            try:
                n = session.first.committed_len
                if seed % 2:
                    await verify(session, n, Proposal(1, n, (1, 2)))
            finally:
                await session.close()

        await asyncio.gather(*(run(seed) for seed in range(200)))
        await until_clean(core)
        assert core.engine.pool.available_blocks == 64


# --- leaving at any moment ---


async def test_cancelled_while_prefilling(start_core):
    async with start_core(max_num_batched_tokens=32) as core:
        watch = Watch(core)
        watch.delay_s = 0.02
        opening = asyncio.create_task(core.open(make_spec(make_prompt(0, 200), 10)))
        await until(lambda: len(watch.batches) == 2)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until_clean(core)
        assert len(watch.batches) <= 3


async def test_closed_while_its_round_is_in_flight(start_core, plain, monkeypatch):
    left = []
    monkeypatch.setattr(round_coalescer.RoundCoalescer, "left", lambda *args: left.append(args[1]))
    async with start_core() as core:
        other = await core.open(make_spec(make_prompt(1), 20))
        session = await core.open(make_spec(make_prompt(0), 20))
        watch = Watch(core)
        watch.delay_s = 0.05
        n = session.first.committed_len
        round_ = asyncio.create_task(verify(session, n, Proposal(1, n, (1, 2, 3))))
        await until(lambda: watch.batches)
        in_use = core.engine.pool.used_blocks
        session.end()
        assert core.engine.pool.used_blocks == in_use  # the device still writes to them
        with pytest.raises(Unavailable, match="closed"):
            await round_
        await session.close()
        assert core.engine.pool.used_blocks < in_use
        assert not left, "steps would wait for its next round"
        watch.delay_s = 0
        again = await core.open(make_spec(make_prompt(0), 20))
        assert again.opened.num_cached_tokens == 11
        assert await decode(again) == plain(make_prompt(0), 20)
        assert await decode(other) == plain(make_prompt(1), 20)
        await again.close()
        await other.close()


async def test_a_cancelled_receive_loses_nothing(start_core, plain):
    async with start_core() as core:
        one, two = [await core.open(make_spec(make_prompt(seed), 20)) for seed in range(2)]
        n = one.first.committed_len
        watch = Watch(core)
        watch.gate.clear()
        flying = asyncio.create_task(verify(one, n))
        await until(lambda: watch.batches)
        queued = asyncio.create_task(verify(two, n))
        await asyncio.sleep(0)
        queued.cancel()
        flying.cancel()
        await asyncio.gather(queued, flying, return_exceptions=True)
        watch.gate.set()
        for seed, session in enumerate((one, two)):
            assert (await session.receive()).token_ids == plain(make_prompt(seed), 20)[1:2]
            await session.close()


async def test_closed_during_multi_step_decode(start_core):
    async with start_core() as core:
        session = await core.open(make_spec(make_prompt(0), 200, multi_step_tokens=200))
        await until(lambda: core.num_steps > 5)
        await session.close()
        watch = Watch(core)
        other = await core.open(make_spec(make_prompt(1), 4))
        assert len(await decode(other)) == 4
        await other.close()
        assert all(len(batch) == 1 for batch in watch.batches), "a step of the closed session"


# --- faults ---


async def test_a_broken_forward_pass_fails_its_sessions_and_no_others(start_core, plain, caplog):
    async with start_core() as core:
        sessions = [await core.open(make_spec(make_prompt(seed), 20)) for seed in range(3)]
        n = sessions[0].first.committed_len
        watch = Watch(core)
        watch.error = RuntimeError("device lost")
        results = await asyncio.gather(*(verify(s, n) for s in sessions[:2]), return_exceptions=True)
        assert all(isinstance(result, InternalError) for result in results)
        assert "device lost" in caplog.text
        watch.error = None
        with pytest.raises(InternalError):
            await verify(sessions[0], n)
        assert await decode(sessions[2]) == plain(make_prompt(2), 20)
        for session in sessions:
            await session.close()
        for seed, num_cached in enumerate((0, 0, 11)):  # what a cache in an unknown state holds is not reused
            session = await core.open(make_spec(make_prompt(seed), 20))
            assert session.opened.num_cached_tokens == num_cached
            await session.close()


async def test_a_session_without_a_token_to_draw_fails_alone(start_core, plain):
    prompt = make_prompt(0)
    async with start_core() as core:
        good = await core.open(make_spec(prompt, 20))
        allowed = [1, 2]
        spec = make_spec(
            prompt, 20, allowed_token_ids=allowed, bad_token_ids=[[t, u] for t in allowed for u in allowed]
        )
        bad = await core.open(spec)  # the second token has no choice left
        n = good.first.committed_len
        fine, error = await asyncio.gather(verify(good, n), verify(bad, n), return_exceptions=True)
        assert isinstance(error, TandemError)
        assert not isinstance(error, InternalError)
        assert fine.token_ids == plain(prompt, 20)[1:2]
        with pytest.raises(type(error)):
            await verify(bad, n)
        await bad.close()
        await good.close()


async def test_closing_the_core_ends_its_sessions(start_core):
    async with start_core(max_num_seqs=1) as core:
        session = await core.open(make_spec(make_prompt(0), 200))
        Watch(core).delay_s = 0.01  # or the session may be over first
        waiting = asyncio.create_task(multi_step_decode(session, session.first.committed_len, 150))
        queued = asyncio.create_task(core.open(make_spec(make_prompt(1), 4)))
        await until(lambda: core.num_steps > 3)
        await core.close()
        for task in (waiting, queued):
            with pytest.raises(Unavailable, match="shutting down"):
                await task
        with pytest.raises(Unavailable):
            await core.open(make_spec(make_prompt(0), 4))
        await session.close()


async def test_an_error_of_the_batcher_itself_ends_all_sessions(start_core, monkeypatch):
    def fail(batcher):
        raise ZeroDivisionError

    async with start_core(max_num_seqs=2) as core:
        idle, session = await core.open(make_spec(make_prompt(0), 200)), await core.open(make_spec(make_prompt(1), 200))
        waiting = asyncio.create_task(idle.receive())
        queued = asyncio.create_task(core.open(make_spec(make_prompt(2), 4)))
        await until(partial(num_waiting, core))
        monkeypatch.setattr(StepBatcher, "_schedule", fail)
        async with asyncio.timeout(30):
            for task in (verify(session, session.first.committed_len), waiting, queued):
                with pytest.raises(InternalError, match="target-batcher ended by an unexpected error"):
                    await task
            await core.failed.wait()
        with pytest.raises(InternalError, match="target-batcher ended"):
            await core.open(make_spec(make_prompt(0), 4))
        await idle.close()
        await session.close()


async def test_a_session_that_cannot_be_ended_holds_up_no_other(start_core, monkeypatch, caplog):
    crash, crashed = Session.crash, []

    def crash_once(session, error):
        crashed.append(session)
        if len(crashed) == 1:
            raise ZeroDivisionError("of a session")
        crash(session, error)

    def fail(batcher):
        raise ZeroDivisionError

    async with start_core(max_num_seqs=3) as core:
        sessions = [await core.open(make_spec(make_prompt(index), 200)) for index in range(3)]
        receiving = {session: asyncio.create_task(session.receive()) for session in sessions[:2]}
        monkeypatch.setattr(Session, "crash", crash_once)
        monkeypatch.setattr(StepBatcher, "_schedule", fail)
        sessions[2].offer(Proposal(1, sessions[2].first.committed_len, ()))
        async with asyncio.timeout(30):
            await core.failed.wait()
            assert set(crashed) == set(sessions)
            for session, task in receiving.items():
                if session is not crashed[0]:
                    with pytest.raises(InternalError, match="target-batcher ended"):
                        await task
        for task in receiving.values():
            task.cancel()
        await asyncio.wait(receiving.values())
        for session in sessions:
            await session.close()
    assert "of a session" in caplog.text


# --- the pure parts ---


def test_rounds_leave_a_share_to_waiting_prompts():
    assert take_rounds([5] * 10, 0, 40) == 8
    assert take_rounds([5] * 10, 1000, 40) == 7
    assert take_rounds([5] * 10, 3, 40) == 7
    assert take_rounds([100], 1000, 40) == 1
    assert take_rounds([], 1000, 40) == 0


def test_prompts_share_the_room():
    assert share_prefill([10, 1000, 1000], 410) == [10, 400 - MIN_CHUNK, MIN_CHUNK]
    assert share_prefill([1000, 10, 50], 512) == [470, 10, MIN_CHUNK]
    assert share_prefill([20] * 3, 512) == [20] * 3
    assert share_prefill([1000] * 10, 2 * MIN_CHUNK) == [MIN_CHUNK] * 2 + [0] * 8
    assert share_prefill([1000] * 3, 2 * MIN_CHUNK + 9) == [MIN_CHUNK, MIN_CHUNK, 9]
    assert share_prefill([1000, 1000], 5) == [5, 0]
    assert share_prefill([1000], 0) == [0]
    assert share_prefill([], 100) == []
    assert share_prefill([7, 300, 11, 90, 2000], 400) == [7, 300, 11, 50, MIN_CHUNK]


def test_where_a_sequence_ends():
    criteria = StopCriteria(prompt_len=10, max_len=20, stop_token_ids=frozenset({7}), min_tokens=2)
    assert criteria.cut(12, (1, 2, 3)) == Truncation((1, 2, 3))
    assert criteria.cut(12, (1, 7, 3)) == Truncation((1, 7), FinishReason.STOP, 7)
    assert criteria.cut(11, (7, 7, 3)) == Truncation((7, 7), FinishReason.STOP, 7)  # the first came too early
    assert criteria.cut(18, (1, 2, 3)) == Truncation((1, 2), FinishReason.LENGTH)
    assert criteria.cut(18, (1, 7)) == Truncation((1, 7), FinishReason.STOP, 7)
    assert criteria.cut(18, (1,)) == Truncation((1,))
    assert criteria.room(15) == 5


def test_prompts_fill_a_step_by_half_while_sessions_draft():
    assert prefill_room(0, 512, is_drafting=False) == 512
    assert prefill_room(12, 512, is_drafting=False) == 372
    assert prefill_room(500, 512, is_drafting=False) == 12, "what is left"
    assert prefill_room(400, 512, is_drafting=False) == 64, "an eighth is theirs in any case"
    assert prefill_room(0, 512, is_drafting=True) == 256
    assert prefill_room(12, 512, is_drafting=True) == 244
    assert prefill_room(400, 512, is_drafting=True) == 64, "an eighth is theirs in any case"
    assert prefill_room(480, 512, is_drafting=True) == 32


async def test_rounds_wait_for_rounds_and_plain_decoding_does_not(start_core, monkeypatch):
    monkeypatch.setattr(round_coalescer, "FIRST_NS", 10**10)
    async with start_core() as core, asyncio.timeout(9):
        away, other, plain = [await core.open(make_spec(make_prompt(seed), 60)) for seed in range(3)]
        n = away.first.committed_len
        await verify(away, n, Proposal(1, n, (1, 2, 3)))  # and does not come back
        await multi_step_decode(plain, plain.first.committed_len, 40)
        waiting = asyncio.create_task(verify(other, n, Proposal(1, n, (1, 2, 3))))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await away.close()
        assert (await waiting).num_draft_tokens == 3
        await other.close()
        await plain.close()


async def test_a_long_prompt_delays_a_session_that_drafts_by_one_full_step(start_core, monkeypatch):
    """It waits for the step that runs and for its own: neither holds more than half of a step's rows of the prompt."""
    monkeypatch.setattr(round_coalescer, "FIRST_NS", 10**10)  # expected however slow this test is
    async with start_core(max_num_batched_tokens=32) as core:
        drafting = await core.open(make_spec(make_prompt(0), 20))
        n = drafting.first.committed_len
        await verify(drafting, n, Proposal(1, n, (1, 2, 3)))
        watch = Watch(core)
        watch.gate.clear()
        opening = asyncio.create_task(core.open(make_spec(make_prompt(1, 90), 2)))
        await until(lambda: watch.batches)
        assert watch.batches[0] == [(16, 0)]
        n = drafting.committed_len
        drafting.offer(Proposal(1, n, (1, 2, 3)))
        watch.gate.set()
        await drafting.receive()
        others = await opening
        assert len(watch.batches) > 4
        with_round = next(batch for batch in watch.batches if len(batch) == 2)
        assert sorted(rows for rows, _ in with_round) == [4, 12]
        await drafting.close()
        await others.close()
