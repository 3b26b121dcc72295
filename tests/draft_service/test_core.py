"""Sessions: advance, cancellation, admission, parking, and what is left behind (nothing)."""

import asyncio
import random

import pytest

from draft_service.draft_request import DraftRequest
from draft_service.session import CoreSession
from engine.kv_pool import KVPool
from specdec.errors import Cancelled, InternalError, InvalidRequest, ModelNotSupported, StaleSession
from specdec.rules import Rule
from specdec.types import ModelInfo
from specdec.vocabulary import check_compatible
from tests.draft_service.proposing import propose

PROMPT = [3, 14, 15, 9, 26, 5]


async def test_advance_is_idempotent(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT, temperature=1.0, rule=Rule.BLOCK))
        first = await propose(session, 6, [1, 2, 3], 4)
        again = await propose(session, 6, [1, 2, 3], 4)
        assert (again.base_len, again.token_ids) == (9, first.token_ids)
        assert again.q_rows == first.q_rows != ()
        assert (await propose(session, 9, [], 4)).token_ids == first.token_ids
        assert (await core.load()).stale_messages == 0
        await session.close()


async def test_overlap_is_trimmed_and_disagreement_rolls_back(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        await propose(session, 6, [1, 2, 3], 4)
        proposal = await propose(session, 7, [2, 3, 4], 4)  # 2 and 3 are known
        assert (proposal.base_len, proposal.token_ids) == (10, greedy([*PROMPT, 1, 2, 3, 4], 4))
        proposal = await propose(session, 6, [1, 9], 4)  # 2, 3, 4 were never committed
        assert (proposal.base_len, proposal.token_ids) == (8, greedy([*PROMPT, 1, 9], 4))
        proposal = await propose(session, 0, [7, 7], 4)  # even the prompt may be replaced
        assert (proposal.base_len, proposal.token_ids) == (2, greedy([7, 7], 4))
        await session.close()


async def test_penalties_forget_tokens_taken_back(start_core, spec):
    async with start_core() as core:
        params = {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0, "prompt_len": 2}
        session = await core.open(spec(PROMPT, **params))
        await propose(session, 6, [30, 31, 32, 30, 30], 4)
        moved = await propose(session, 6, [33, 34], 4)
        await session.close()
        fresh = await core.open(spec([*PROMPT, 33, 34], **params))
        assert moved.token_ids == (await propose(fresh, 8, [], 4)).token_ids
        await fresh.close()


async def test_an_old_message_changes_nothing(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        await propose(session, 6, [1, 2, 3], 4)
        old = await propose(session, 6, [1], 4)
        assert (old.base_len, old.token_ids) == (7, ())
        assert (await core.load()).stale_messages == 1
        assert session.committed_len == 9
        assert (await propose(session, 9, [4], 4)).token_ids == greedy([*PROMPT, 1, 2, 3, 4], 4)
        await session.close()


async def test_a_gap_is_stale(start_core, spec):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        with pytest.raises(StaleSession, match=r"length 9.*6 tokens"):
            await propose(session, 9, [1], 4)
        assert (await core.load()).stale_messages == 1
        assert len((await propose(session, 6, [1], 4)).token_ids) == 4  # the session itself is well
        await session.close()
        with pytest.raises(StaleSession):
            await propose(session, 7, [1], 4)


async def test_moving_only_drafts_nothing(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        for i in range(10):
            await session.advance(6 + i, [i], 0)
        assert session.committed_len == 16
        assert (await propose(session, 16, [], 4)).token_ids == greedy([*PROMPT, *range(10)], 4)
        assert (await propose(session, 16, [5], 0)).token_ids == ()
        await session.close()


@pytest.mark.parametrize("tokens", [[48], [-1], [3, 10**6]])
async def test_unknown_tokens_are_refused(start_core, spec, tokens):
    async with start_core() as core:
        with pytest.raises(InvalidRequest, match="0 to 47"):
            await core.open(spec(tokens))
        session = await core.open(spec(PROMPT))
        with pytest.raises(InvalidRequest, match="0 to 47"):
            await propose(session, 6, tokens, 4)
        await session.close()


async def test_openings_that_make_no_sense(start_core, spec):
    async with start_core() as core:
        for tokens, prompt_len in ((PROMPT, 0), (PROMPT, 7), ((), 0), ((), 1)):
            with pytest.raises(InvalidRequest) as caught:
                await core.open(spec(tokens, prompt_len=prompt_len))
            assert caught.value.param == "prompt_len"


async def test_what_opening_says(start_core, spec):
    async with start_core(k=4) as core:
        session = await core.open(spec(PROMPT, epoch=3, num_speculative_tokens=2))
        assert (session.opened.epoch, session.opened.num_speculative_tokens) == (3, 2)
        proposal = await propose(session, 6, [1], 64)
        assert (proposal.epoch, len(proposal.token_ids)) == (3, 2)
        assert proposal.draft_ns > 0
        assert proposal.queue_ns > 0
        await session.close()
        assert session.opened.num_cached_tokens == 0
        info = await core.info()
        assert (info.method, info.num_speculative_tokens, info.vocab_size) == ("draft_model", 4, 48)


async def test_cancel_at_any_moment(start_core, spec, greedy):
    """Calls cancelled after any number of iterations of the loop: the session continues, or leaves nothing."""
    rng = random.Random(0)
    async with start_core(scheduler={"max_num_batched_tokens": 16}) as core:
        for attempt in range(60):
            opening = asyncio.create_task(core.open(spec([i % 48 for i in range(100)], session_id=str(attempt))))
            await yield_to_the_loop(rng, attempt)
            opening.cancel()
            try:
                session = await opening
            except asyncio.CancelledError:
                continue
            await session.close()
        assert (await core.load()).used_blocks == 0

        session = await core.open(spec(PROMPT))
        known = list(PROMPT)
        for attempt in range(60):
            call = asyncio.create_task(propose(session, len(known), [attempt % 48], 4))
            await yield_to_the_loop(rng, attempt)
            call.cancel()
            await asyncio.wait((call,))
            proposal = await propose(session, len(known), [attempt % 48], 4)  # sent again
            known.append(attempt % 48)
            assert proposal.token_ids == greedy(known, 4)
        await session.close()


async def yield_to_the_loop(rng, attempt):
    for _ in range(attempt % 12):
        await asyncio.sleep(0)
    if attempt % 3 == 0:
        await asyncio.sleep(rng.random() * 0.003)


async def test_close_during_a_proposal_frees_once(start_core, spec, monkeypatch):
    rng = random.Random(1)
    async with start_core() as core:
        released = []
        release = KVPool.release

        def note(pool, sequence, *given):
            released.append(sequence)
            release(pool, sequence, *given)

        monkeypatch.setattr(KVPool, "release", note)
        for attempt in range(40):
            session = await core.open(spec(PROMPT, session_id=str(attempt)))
            call = asyncio.create_task(propose(session, 6, [1, 2], 4))
            await yield_to_the_loop(rng, attempt)
            await asyncio.gather(session.close(), session.close())
            assert (await core.load()).used_blocks == 0
            outcome = (await asyncio.gather(call, return_exceptions=True))[0]
            assert isinstance(outcome, Cancelled | StaleSession) or outcome.base_len == 8
        assert len(released) == len({id(sequence) for sequence in released}) == 40


async def test_a_cancelled_close_still_frees(start_core, spec, monkeypatch):
    monkeypatch.setattr("engine.device_thread.MAX_INLINE_NS", 0)  # drafts run on the device thread
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        call = asyncio.create_task(propose(session, 6, [1, 2], 4))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        closing = asyncio.create_task(session.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((call, closing))
        await session.close()
        assert (await core.load()).used_blocks == 0
        assert isinstance(call.exception(), Cancelled)


async def test_a_newer_call_overtakes_a_queued_one(start_core, spec, greedy, monkeypatch):
    monkeypatch.setattr("engine.device_thread.MAX_INLINE_NS", 0)  # drafts run on the device thread
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        for i in range(4):  # the first begins at once, the others wait for it to end
            await session.advance(6, list(range(i + 1)), 4)
            await asyncio.sleep(0)
        proposal = await session.receive()
        assert proposal.base_len == 10
        assert proposal.token_ids == greedy([*PROMPT, 0, 1, 2, 3], 4)
        await session.close()


async def test_a_wrong_message_leaves_the_session_as_it_was(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        for base_len, tokens, error in ((9, [1], StaleSession), (6, [48], InvalidRequest)):
            await session.advance(base_len, tokens, 4)
            with pytest.raises(error):
                await session.receive()
        assert (await propose(session, 6, [1], 4)).token_ids == greedy([*PROMPT, 1], 4)
        await session.close()


async def test_no_block_is_lost_over_200_sessions(start_core, spec):
    rng = random.Random(5)

    async def one(number):
        session = await core.open(
            spec([rng.randrange(48) for _ in range(rng.randrange(1, 120))], session_id=str(number), max_tokens=50)
        )
        try:
            for length in range(session.committed_len, session.committed_len + rng.randrange(4)):
                call = asyncio.create_task(propose(session, length, [rng.randrange(48)], 4))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.random() * 0.01)
                    call.cancel()
                    await asyncio.wait((call,))
                    break
                await call
        finally:
            await session.close()

    async with start_core() as core:
        for start in range(0, 200, 20):
            tasks = [asyncio.create_task(one(number)) for number in range(start, start + 20)]
            await asyncio.sleep(rng.random() * 0.02)
            rng.choice(tasks).cancel()
            await asyncio.wait(tasks)
        load = await core.load()
        assert (load.used_blocks, load.open_sessions) == (0, 0)


def info(name, size, fingerprint, vocab_size=None):
    return ModelInfo(name=name, vocab_size=vocab_size or size, tokenizer_size=size, tokenizer_fingerprint=fingerprint)


def test_vocabularies():
    target = info("big", 100, "abc", vocab_size=128)
    check_compatible(target, info("small", 100, "abc"))
    check_compatible(target, ModelInfo(name="ngram", method="ngram"))
    check_compatible(ModelInfo(name="a", vocab_size=50), ModelInfo(name="b", vocab_size=50))
    for draft in (info("small", 100, "abd"), info("small", 99, "abc"), info("small", 100, "")):
        with pytest.raises(ModelNotSupported, match=r"small.*big"):
            check_compatible(target, draft)
    with pytest.raises(ModelNotSupported, match=r"b.*a"):
        check_compatible(ModelInfo(name="a", vocab_size=50), ModelInfo(name="b", vocab_size=51))


async def test_the_load_says_how_long_batches_took(start_core, spec):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        before = await core.load()
        proposal = await propose(session, 6, [1], 4)
        after = await core.load()
        assert after.num_batches - before.num_batches == 1
        assert after.busy_ns - before.busy_ns == proposal.draft_ns > 0
        await session.close()


async def test_a_draft_that_fails_is_reported_and_the_session_continues(start_core, spec, greedy, monkeypatch):
    def fail(*_):
        raise RuntimeError("planted")

    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        with monkeypatch.context() as patch:
            patch.setattr("draft_service.drafters.draft_model.draft_chains", fail)
            await session.advance(6, [1], 4)
            with pytest.raises(RuntimeError, match="planted"):
                await session.receive()
        assert (await propose(session, 7, [2], 4)).token_ids == greedy([*PROMPT, 1, 2], 4)
        await session.close()


@pytest.mark.parametrize("name", ["_next_batch", "resolve"])
async def test_an_error_of_the_batcher_itself_ends_all_sessions(start_core, spec, monkeypatch, name):
    def fail(*given):
        raise ZeroDivisionError

    async with start_core() as core:
        idle, session = await core.open(spec(PROMPT)), await core.open(spec(PROMPT))
        waiting = asyncio.create_task(idle.receive())
        if name == "resolve":  # while outcomes are delivered
            resolve = DraftRequest.resolve

            def fail_once(*given):
                monkeypatch.setattr(DraftRequest, "resolve", resolve)
                fail()

            monkeypatch.setattr(DraftRequest, "resolve", fail_once)
        else:
            monkeypatch.setattr(core.batcher, name, fail)
        async with asyncio.timeout(30):
            for task in (propose(session, 6, [1, 2, 3], 4), waiting):
                with pytest.raises(InternalError, match="draft-batcher ended by an unexpected error"):
                    await task
            await core.failed.wait()
            await session.advance(9, [4], 4)
            with pytest.raises(InternalError):
                await session.receive()
        with pytest.raises(InternalError, match="draft-batcher ended"):
            await core.open(spec(PROMPT))
        await idle.close()
        await session.close()


@pytest.mark.parametrize("name", ["fail", "resolve"])
async def test_what_cannot_be_ended_holds_up_nothing_else(start_core, spec, monkeypatch, caplog, name):
    owner = CoreSession if name == "fail" else DraftRequest
    end, ended = getattr(owner, name), []

    def end_once(self, outcome):
        ended.append(self)
        if len(ended) == 1:
            raise ZeroDivisionError("of one")
        end(self, outcome)

    def fail(*given):
        raise ZeroDivisionError

    async with start_core() as core:
        sessions = [await core.open(spec(PROMPT)) for _ in range(3)]
        monkeypatch.setattr(core.batcher, "_next_batch", fail)
        monkeypatch.setattr(owner, name, end_once)
        async with asyncio.timeout(30):
            for session in sessions:
                await session.advance(6, [1, 2, 3], 4)
            await core.failed.wait()
            for session in sessions:
                with pytest.raises(InternalError, match="draft-batcher ended"):
                    await session.receive()
        assert len(ended) == 3
        for session in sessions:
            await session.close()
    assert "of one" in caplog.text
