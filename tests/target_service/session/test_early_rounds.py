"""Rounds that arrive during multi-step decode: they take its place where they fit, and never change the text."""

import asyncio

import numpy as np
import pytest

from engine.sampling.sparse import pack
from specdec.rules import Rule
from specdec.types import FinishReason, Proposal
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, nothing_comes
from tests.target_service.scheduler.watch import Watch
from tests.until import until

NUM_TOKENS = 16
GREEDY, COUPLED = {}, {"temperature": 1.0, "rule": Rule.COUPLED}


async def counts(core):
    load = await core.load()
    return load.stale_messages, load.superseded_proposals


async def rest_of(session, num_tokens):
    """The verdicts up to ``num_tokens`` more tokens; the text continues after a round."""
    verdicts = []
    while sum(len(verdict.token_ids) for verdict in verdicts) < num_tokens:
        if verdicts and not verdicts[-1].num_multi_step_left:
            session.multi_step_decode(session.committed_len, NUM_TOKENS)
        verdicts.append(await session.receive())
    return verdicts


def text_of(verdicts):
    return tuple(token for verdict in verdicts for token in verdict.token_ids)


async def reach(session, length):
    """Let steps run, without receiving, until so much is committed."""
    while session.committed_len < length:  # noqa: ASYNC110
        await asyncio.sleep(0)


def slow(core):
    """The event loop sees each step."""
    Watch(core).delay_s = 0.001


async def reference(core, prompt, params):
    session = await core.open(make_spec(prompt, NUM_TOKENS, multi_step_tokens=NUM_TOKENS, **params))
    text = (*session.first.token_ids, *text_of(await rest_of(session, NUM_TOKENS - 1)))
    await session.close()
    return text


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("lag", "wrong_at"), [(0, None), (1, 4), (3, 2)])
async def test_a_round_at_every_length(start_core, params, lag, wrong_at):
    """The session is ``lag`` tokens ahead of the length that the round names when it arrives."""
    prompt = make_prompt(0)
    async with start_core() as core:
        slow(core)
        text = await reference(core, prompt, params)
        drafted = list(text)
        num_rounds = 0
        for offset in range(NUM_TOKENS - 1):
            session = await core.open(make_spec(prompt, NUM_TOKENS, **params))
            n = session.first.committed_len
            session.multi_step_decode(n, NUM_TOKENS - 1)
            await reach(session, n + min(offset + lag, NUM_TOKENS - 1))
            draft = drafted[1 + offset : 7 + offset]
            if wrong_at is not None and wrong_at < len(draft):
                draft[wrong_at] = (draft[wrong_at] + 1) % VOCAB
            session.offer(Proposal(1, n + offset, tuple(draft)))
            verdicts = await rest_of(session, NUM_TOKENS - 1)
            assert (*session.first.token_ids, *text_of(verdicts)) == text
            assert verdicts[-1].finish_reason is FinishReason.LENGTH
            rounds = [verdict for verdict in verdicts if verdict.num_draft_tokens]
            num_rounds += len(rounds)
            assert len(rounds) <= 1
            for verdict in rounds:
                assert n + offset <= verdict.base_len < n + offset + len(draft)
                assert verdict.num_draft_tokens <= n + offset + len(draft) - verdict.base_len
            await session.close()
        stale, superseded = await counts(core)
        assert stale == 0
        assert num_rounds + superseded == NUM_TOKENS - 1
        if lag == 3:
            assert num_rounds == 0  # what was committed meanwhile is not what was drafted
        else:
            assert num_rounds >= NUM_TOKENS // 2


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_q_rows_are_cut_with_their_tokens(start_core, rule):
    prompt = make_prompt(1)
    async with start_core() as core:
        slow(core)
        text = await reference(core, prompt, {"temperature": 1.0, "rule": rule})
        session = await core.open(make_spec(prompt, NUM_TOKENS, temperature=1.0, rule=rule))
        n = session.first.committed_len
        session.multi_step_decode(n, NUM_TOKENS)
        await reach(session, n + 2)
        rows = tuple(pack(np.array([token]), np.array([15])) for token in text[1:7])
        session.offer(Proposal(1, n, text[1:7], q_rows=rows))
        verdict = (await rest_of(session, 3))[-1]
        while not verdict.num_draft_tokens:
            verdict = await session.receive()
        assert n + 2 <= verdict.base_len < n + 6
        assert verdict.num_draft_tokens == n + 6 - verdict.base_len
        await session.close()


async def test_a_round_ends_multi_step_decode(start_core, plain):
    prompt = make_prompt(2)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        slow(core)
        session = await core.open(make_spec(prompt, NUM_TOKENS, multi_step_tokens=14))
        n = session.first.committed_len
        assert session.first.num_multi_step_left == 14
        session.offer(Proposal(1, n, text[1:5]))
        verdicts = [await session.receive()]
        while not verdicts[-1].num_draft_tokens:
            verdicts.append(await session.receive())
        assert verdicts[-1].num_multi_step_left == 0
        assert text_of(verdicts) == text[1:6]
        await nothing_comes(session)
        await session.close()


async def test_a_newer_round_replaces_one_that_waits(start_core, plain):
    prompt = make_prompt(3)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        slow(core)
        session = await core.open(make_spec(prompt, NUM_TOKENS, multi_step_tokens=14))
        n = session.first.committed_len
        session.offer(Proposal(1, n, text[1:3]))
        session.offer(Proposal(1, n, text[1:8]))
        verdicts = [await session.receive()]
        while not verdicts[-1].num_draft_tokens:
            verdicts.append(await session.receive())
        assert text_of(verdicts) == text[1:9]
        assert await counts(core) == (0, 1)
        await nothing_comes(session)
        await session.close()


async def test_multi_step_decode_ends_with_the_next_token_on_request(start_core, plain):
    prompt = make_prompt(4)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        slow(core)
        for offset in range(3):
            session = await core.open(make_spec(prompt, NUM_TOKENS, multi_step_tokens=14))
            n = session.first.committed_len
            await reach(session, n + offset)
            session.multi_step_decode(n, 0)
            verdicts = [session.first]
            while verdicts[-1].num_multi_step_left:
                verdicts.append(await session.receive())
            done = len(text_of(verdicts))
            assert 2 + offset <= done < 12 + offset  # the device thread is a few steps ahead
            assert text_of(verdicts) == text[:done]
            await nothing_comes(session)
            session.offer(Proposal(1, len(prompt) + done, text[done : done + 3]))
            assert (await session.receive()).token_ids == text[done : done + 4]
            await session.close()
        assert await counts(core) == (0, 0)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_tree_is_verified_only_where_nothing_was_committed_since(start_core, plain, is_late):
    prompt = make_prompt(5)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, NUM_TOKENS))
        watch = Watch(core)
        watch.gate.clear()
        n = session.first.committed_len
        session.multi_step_decode(n, NUM_TOKENS - 1)
        if is_late:
            await until(lambda: watch.batches)  # a step runs and will commit a token
        session.offer(Proposal(1, n, ((text[1] + 1) % VOCAB, text[1]), parents=(-1, -1)))
        watch.gate.set()
        verdicts = await rest_of(session, NUM_TOKENS - 1)
        assert text_of(verdicts) == text[1:]
        assert verdicts[0].num_draft_tokens == (0 if is_late else 2)
        assert await counts(core) == (0, is_late)
        await session.close()


async def test_a_round_sent_twice_is_stale_once_multi_step_decode_is_over(start_core, plain):
    """Only rounds that were sent during multi-step decode may come too late."""
    prompt = make_prompt(6)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, NUM_TOKENS))
        n = session.first.committed_len
        session.multi_step_decode(n, 3)
        await rest_of(session, 3)
        wrong = Proposal(1, n + 1, ((text[2] + 1) % VOCAB,))
        session.offer(wrong)
        assert await counts(core) == (0, 1)  # sent before the third token of multi-step decode was known
        right = Proposal(1, n + 3, text[4:6])
        session.offer(right)
        assert (await session.receive()).token_ids == text[4:7]
        session.offer(right)
        session.offer(wrong)
        assert await counts(core) == (2, 1)
        await session.close()


async def test_multi_step_decode_from_before_a_round_is_stale(start_core, plain):
    prompt = make_prompt(7)
    text = plain(prompt, NUM_TOKENS)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, NUM_TOKENS))
        n = session.first.committed_len
        session.offer(Proposal(1, n, text[1:4]))
        assert (await session.receive()).token_ids == text[1:5]
        session.multi_step_decode(n, 12)
        assert await counts(core) == (1, 0)
        await nothing_comes(session)
        await session.close()
