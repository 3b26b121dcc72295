"""Prompts that begin alike are computed once, and their texts are those without that."""

from __future__ import annotations

import asyncio

import pytest

from specdec.types import Proposal
from tests.target_service.conftest import VOCAB, decode, make_prompt, make_spec
from tests.target_service.scheduler.watch import Watch


async def test_a_conversation_is_fed_from_where_it_continues(start_core, plain):
    prompt = make_prompt(19, 40)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 20))
        assert session.opened.num_cached_tokens == 0
        text = await decode(session)
        await session.close()
        follow = (*prompt, *text, *make_prompt(20, 9))
        session = await core.open(make_spec(follow, 15))
        assert session.opened.num_cached_tokens == len(prompt) + 19  # the last token was never fed
        assert await decode(session) == plain(follow, 15)
        await session.close()
        other = (*prompt[:25], (prompt[25] + 1) % VOCAB, *make_prompt(21, 9))
        session = await core.open(make_spec(other, 15))
        assert session.opened.num_cached_tokens == 25
        assert await decode(session) == plain(other, 15)
        await session.close()


async def test_the_same_prompt_again_is_fed_from_its_last_token(start_core, plain):
    prompt = make_prompt(22, 30)
    async with start_core() as core:
        for cached in (0, 29):
            session = await core.open(make_spec(prompt, 8))
            assert session.opened.num_cached_tokens == cached
            assert await decode(session) == plain(prompt, 8)
            await session.close()


@pytest.mark.parametrize("length", [3, 4, 15, 16, 17, 20, 31, 32, 33, 48, 49])
async def test_at_every_offset_around_a_block(start_core, plain, length):
    """The end of the common beginning lies before, at or behind the end of a block of 16; a quarter is copied."""
    prompt = make_prompt(30, 50)
    async with start_core() as core:
        await (await core.open(make_spec(prompt, 4))).close()
        other = (*prompt[:length], (prompt[length] + 1) % VOCAB, *make_prompt(31, 5))
        session = await core.open(make_spec(other, 20))
        assert session.opened.num_cached_tokens == (length if length % 16 >= 4 else length // 16 * 16)
        text = plain(other, 20)
        assert await decode(session, k=3, draft=lambda tokens, k: text[len(tokens) :][:k]) == text
        await session.close()


async def test_owners_and_salts_share_nothing(start_core):
    prompt = make_prompt(23, 40)
    cached = []
    async with start_core() as core:
        for owner, salt in (("a", ""), ("b", ""), ("a", "x"), ("a", ""), ("a", "x"), ("", ""), ("", "a")):
            session = await core.open(make_spec(prompt, 4, owner=owner, cache_salt=salt))
            cached.append(session.opened.num_cached_tokens)
            await session.close()
    assert cached == [0, 0, 0, 39, 39, 0, 0]


async def test_it_can_be_switched_off(start_core, plain):
    prompt = make_prompt(24, 40)
    async with start_core(enable_prefix_caching=False) as core:
        for _ in range(2):
            session = await core.open(make_spec(prompt, 8))
            assert session.opened.num_cached_tokens == 0
            assert await decode(session) == plain(prompt, 8)
            await session.close()
        assert core.engine.pool.cached_blocks == 0


async def test_prompt_logprobs_need_the_whole_prompt(start_core):
    prompt = make_prompt(24, 40)
    async with start_core() as core:
        for _ in range(2):
            session = await core.open(make_spec(prompt, 4, prompt_logprobs=0))
            assert session.opened.num_cached_tokens == 0
            assert len(session.opened.prompt_logprobs) == 39
            await session.close()


async def test_prompts_that_arrive_together_are_computed_once(start_core, plain):
    system = make_prompt(25, 100)
    prompts = [(*system, *make_prompt(seed, 10)) for seed in range(6)]
    async with start_core(max_num_batched_tokens=64) as core:
        watch = Watch(core)
        sessions = await asyncio.gather(*(core.open(make_spec(prompt, 10)) for prompt in prompts))
        num_rows = sum(rows for batch in watch.batches for rows, _ in batch)
        assert num_rows <= 112 + 5 * (110 - 96) + 6, "one of them computes the blocks that all have"
        for session, prompt in zip(sessions, prompts, strict=True):
            assert await decode(session) == plain(prompt, 10)
            await session.close()


async def test_a_session_shares_what_it_decodes_while_it_is_open(start_core, plain):
    prompt = make_prompt(26, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 60))
        n, tokens = session.first.committed_len, list(session.first.token_ids)
        while len(tokens) < 40:
            session.offer(Proposal(1, n, plain(prompt, 60)[len(tokens) :][:4]))
            verdict = await session.receive()
            tokens += verdict.token_ids
            n = verdict.committed_len
        fork = (*prompt, *tokens[:35], 3)
        other = await core.open(make_spec(fork, 10))
        assert other.opened.num_cached_tokens == 48, "the full blocks of 55 tokens"
        assert await decode(other) == plain(fork, 10)
        while len(tokens) < 60:
            session.offer(Proposal(1, n, ()))
            verdict = await session.receive()
            tokens += verdict.token_ids
            n = verdict.committed_len
        assert tuple(tokens) == plain(prompt, 60)
        await session.close()
        await other.close()


async def test_what_is_cached_yields_to_open_sessions(start_core, plain):
    async with start_core(kv_blocks=16) as core:
        for seed in range(5):
            session = await core.open(make_spec(make_prompt(seed, 50), 14))
            await decode(session)
            await session.close()
        load = await core.load()
        assert (load.used_blocks, load.cached_blocks) == (0, 16)
        big = await core.open(make_spec(make_prompt(26, 100), 100))
        assert await decode(big) == plain(make_prompt(26, 100), 100)
        await big.close()
        newest = await core.open(make_spec(make_prompt(4, 50), 4))
        oldest = await core.open(make_spec(make_prompt(0, 50), 4))
        assert newest.opened.num_cached_tokens > oldest.opened.num_cached_tokens == 0
        await newest.close()
        await oldest.close()


@pytest.mark.parametrize("length", [20, 32, 45])
async def test_logprobs_after_reused_entries_are_the_same_to_the_bit(start_core, length):
    prompt = make_prompt(40, 50)

    async def logprobs(core, salt):
        session = await core.open(make_spec((*prompt[:length], 1, 2, 3), 20, logprobs=5, cache_salt=salt))
        scores, verdict = [*session.first.logprobs], session.first
        while verdict.finish_reason is None:
            session.offer(Proposal(1, session.committed_len, (1, 2)))
            verdict = await session.receive()
            scores += verdict.logprobs
        num_cached = session.opened.num_cached_tokens
        await session.close()
        return num_cached, scores

    async with start_core() as core:
        await (await core.open(make_spec(prompt, 4))).close()
        reused, alone = await logprobs(core, ""), await logprobs(core, "alone")
        assert (reused[0], alone[0]) == (length // 16 * 16 + (length % 16 if length % 16 >= 4 else 0), 0)
        assert reused[1] == alone[1]
