"""Streams: the draft goes on after its own tokens until it hears otherwise."""

import asyncio
import random

import pytest

from specdec.rules import Rule
from tests.until import until

PROMPT = [3, 14, 15, 9, 26, 5]
K, AHEAD = 3, 10


async def take(core, session):
    """What was sent once nothing is drafted any more."""
    await until(lambda: core.batcher.is_idle)
    return session.received_more()


async def stream(session, base_len, token_ids, k=K, ahead=AHEAD):
    await session.advance(base_len, token_ids, k, (), ahead)


async def test_a_stream_goes_on_up_to_its_limit_and_with_what_is_committed(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        assert session.opened.streams
        await stream(session, 6, [1])
        text = greedy([*PROMPT, 1], 30)
        first = await take(core, session)
        assert [(p.base_len, p.token_ids) for p in first] == [
            (7 + i, text[i : i + n]) for i, n in ((0, 3), (3, 3), (6, 2))
        ]
        await stream(session, 7, text[:1])  # it agrees: the chain grows to its limit
        more = await take(core, session)
        assert [(p.base_len, p.token_ids) for p in more] == [(15, text[8:11])]
        await stream(session, 8, text[1:2])
        more = await take(core, session)
        assert [(p.base_len, p.token_ids, p.chain) for p in more] == [(18, text[11:12], first[0].chain)]
        await stream(session, 9, text[2:15])  # the target is past all drafts
        beyond = await take(core, session)
        assert (beyond[0].base_len, beyond[0].token_ids) == (22, text[15:18])
        assert beyond[0].chain > first[0].chain
        assert (await core.load()).stale_messages == 0
        await session.close()


async def test_a_token_that_differs_begins_a_chain_after_it(start_core, spec, greedy):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        await stream(session, 6, [1])
        text = greedy([*PROMPT, 1], 2)
        before = await take(core, session)
        other = (text[1] + 1) % 48
        await stream(session, 7, [text[0], other])
        after = await take(core, session)
        assert (after[0].base_len, after[0].token_ids) == (9, greedy([*PROMPT, 1, text[0], other], K))
        assert {p.chain for p in after} == {before[0].chain + 1}
        await session.close()


@pytest.mark.parametrize("ends_with_a_question", [False, True])
async def test_a_stream_ends_and_its_drafts_are_taken_back(start_core, spec, greedy, ends_with_a_question):
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        await stream(session, 6, [1])
        await take(core, session)
        text = greedy([*PROMPT, 1], 8)
        await session.advance(7, text[:1], 4 if ends_with_a_question else 0)
        answers = await take(core, session)
        assert [(p.base_len, p.token_ids) for p in answers] == [(8, text[1:5])] * ends_with_a_question
        assert len(session.state.token_ids) == session.committed_len == 8
        await session.close()


async def test_who_streams(start_core, spec):
    """Not for rules that need q, and not what would have to be computed again."""
    for rule, temperature, streams in ((Rule.COUPLED, 1.0, True), (Rule.BLOCK, 0.0, True), (Rule.BLOCK, 1.0, False)):
        async with start_core() as core:
            session = await core.open(spec(PROMPT, rule=rule, temperature=temperature))
            assert session.opened.streams is streams
            await stream(session, 6, [1])
            assert len(await take(core, session)) == (3 if streams else 1)
            await session.close()
    async with start_core("ngram") as core:
        session = await core.open(spec(PROMPT))
        assert not session.opened.streams
        await session.close()
    async with start_core(tree_top_k=2) as core:
        session = await core.open(spec(PROMPT))
        assert not session.opened.streams
        await session.close()


@pytest.mark.parametrize("seed", range(8))
async def test_any_order_of_messages_gives_chains_of_the_model(start_core, spec, greedy, seed):
    """Verdicts that agree, differ or run ahead, while batches run or not: each chain is what the model writes alone
    after the tokens that it begins with, and the last one goes on after what was committed.
    """
    dice, texts = random.Random(seed), {}
    async with start_core() as core:
        session = await core.open(spec(PROMPT))
        known = [*PROMPT]

        def check(proposal):
            start, ids = texts.setdefault(proposal.chain, (proposal.base_len, [*known[: proposal.base_len]]))
            assert proposal.base_len == len(ids) >= start
            assert proposal.token_ids == greedy(ids, len(proposal.token_ids))
            ids += proposal.token_ids

        for _ in range(25):
            news = [*greedy(known, dice.randint(0, 5))]
            if news and dice.random() < 0.4:
                news[-1] = (news[-1] + 1) % 48
            await stream(session, len(known), news, ahead=dice.choice((4, AHEAD)))
            known += news
            for _ in range(dice.randint(0, 6)):
                await asyncio.sleep(0.001 * dice.randint(0, 2))
            for proposal in session.received_more():
                check(proposal)
        for proposal in await take(core, session):
            check(proposal)
        _, last = max(texts.items())
        assert last[1][: len(known)] == known
        await session.close()
    assert len(texts) > 3
