"""Drafting ahead of verdicts: every proposal is the one that would be drafted for its prefix, and nothing is left."""

import asyncio
import random

import pytest

from specdec.lookup import suffix
from specdec.rules import Rule
from tests.draft_service.ahead.ahead_client import PROMPT, Client, look_at_all, rest, values
from tests.draft_service.proposing import propose

EDITS = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "top_k": 12, "bad_token_ids": [[4, 5]]}


KINDS = {
    "greedy": {},
    "greedy-edits": {**EDITS, "repetition_penalty": 1.1},
    "coupled": {"rule": Rule.COUPLED, "temperature": 1.0},
    "coupled-edits": {"rule": Rule.COUPLED, "temperature": 0.8, **EDITS},
    "token": {"rule": Rule.TOKEN, "temperature": 1.0},
    "block": {"rule": Rule.BLOCK, "temperature": 1.0},
    "block-edits": {"rule": Rule.BLOCK, "temperature": 0.8, **EDITS},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("greedy", "coupled-edits", "block")),
        ("greedy", {"draft_window_size": 24}),
        *((kind, {"model": "parallel"}) for kind in ("greedy", "coupled-edits", "block")),
        *(
            pytest.param(kind, {}, marks=pytest.mark.exhaustive)
            for kind in KINDS
            if kind not in {"greedy", "coupled-edits", "block"}
        ),
    ],
)
async def test_every_proposal_ahead_is_the_fresh_one(  # noqa: PLR0917
    start_core, spec, monkeypatch, parallel_checkpoint, kind, options
):
    """Many rounds, each verdict one of those that were drafted for, or every fourth time another; every branch is
    compared."""
    look_at_all(monkeypatch)
    rng = random.Random(7)
    hits = misses = compared = 0
    if "model" in options:
        options = {"model": {"folder": parallel_checkpoint}}
    async with start_core(k=3, **options) as core:
        opening = spec(PROMPT, **KINDS[kind])
        client = Client(await core.open(opening), PROMPT)

        async def fresh(prefix):
            """What a session that is opened for it drafts after a prefix."""
            session = await core.open(spec(prefix, prompt_len=len(PROMPT), session_id="fresh", **KINDS[kind]))
            proposal = await propose(session, len(prefix), [], 3)
            await session.close()
            return values(proposal)

        news = [1]
        for number in range(25):
            proposal, was_sent = await client.advance(news, 3, 10)
            hits, misses = hits + was_sent, misses + (not was_sent)
            assert values(proposal) == await fresh(client.known)
            await rest(core)
            client.collect()
            for ahead in client.kept:
                prefix = [*client.known[: ahead.base_len], *ahead.assumed_token_ids]
                assert values(ahead) == await fresh(prefix), (ahead.assumed_token_ids, compared)
                compared += 1
            likely = [p for p in client.kept if p.base_len == len(client.known)]
            if likely and number % 4:
                news = list(rng.choice(likely).assumed_token_ids)
                continue
            news = [*proposal.token_ids[: rng.randrange(4)], rng.randrange(48)]
            while tuple(news) in {p.assumed_token_ids for p in likely}:
                news[-1] = rng.randrange(48)
        await client.session.close()
    assert hits > 10
    assert misses >= 6, "those whose verdict nobody drafted for"
    assert compared > 150


@pytest.mark.parametrize("kind", ["greedy", "coupled"])
async def test_the_targets_own_model_is_always_predicted(start_core, spec, own_target, monkeypatch, kind):
    """Draft = target: every verdict accepts all, and its last token is the best guess."""
    monkeypatch.setattr("draft_service.ahead.scheduler.BusyShare.share", lambda share: 0.0)
    opening = spec(PROMPT, max_tokens=1900, **KINDS[kind])
    target = own_target(opening)
    async with start_core(k=4) as core:
        client = Client(await core.open(opening), PROMPT)
        _, news = target.verify()
        num_predicted = 0
        for _ in range(100):
            proposal, was_sent = await client.advance(list(news), 4, 4)
            num_predicted += was_sent
            count, news = target.verify(proposal)
            assert (count, len(proposal.token_ids)) == (4, 4)
            await rest(core)
            client.collect()
        assert num_predicted == 99
        counts = core.ahead.counts
        assert (counts.num_hits, counts.num_hit_tokens) == (99, 99 * 4)
        assert counts.num_proposals >= 99
        await client.session.close()
    target.close()


@pytest.mark.parametrize("kind", ["coupled", "block"])
async def test_a_model_like_the_targets_is_often_predicted(start_core, spec, kindred_target, monkeypatch, kind):
    """What the target commits is the same text as without drafting ahead."""
    look_at_all(monkeypatch)
    opening = spec(PROMPT, max_tokens=400, **KINDS[kind])
    texts, num_predicted, num_rounds = [], 0, 0
    async with start_core(k=3) as core:
        for num_ahead_proposals in (0, 8):
            target = kindred_target(opening)
            client = Client(await core.open(opening), PROMPT)
            _, news = target.verify()
            while len(target.state) < 250:
                proposal, was_sent = await client.advance(list(news), 3, num_ahead_proposals)
                num_predicted += was_sent
                num_rounds += num_ahead_proposals > 0
                _, news = target.verify(proposal)
                await rest(core)
                client.collect()
            texts.append(target.state.token_ids)
            await client.session.close()
            target.close()
        assert core.ahead.counts.num_hits == num_predicted
    assert texts[0] == texts[1]
    assert num_predicted > 0.1 * num_rounds


@pytest.mark.parametrize(
    "method",
    ["ngram", "suffix", ("suffix", "ngram"), ("ngram", "draft_model"), ("suffix", "draft_model")],
    ids="-".join,
)
async def test_what_is_looked_up_continues_with_its_copy(start_core, spec, monkeypatch, method):
    look_at_all(monkeypatch)
    monkeypatch.setattr(suffix, "LONG_MATCH", 3)
    rng = random.Random(5)
    text = [rng.randrange(6) for _ in range(40)]
    hits = compared = 0
    async with start_core(method=method, k=3) as core:
        client = Client(await core.open(spec(text)), text)
        news = [text[0]]
        for _ in range(60):
            proposal, was_sent = await client.advance(news, 3, 4)
            hits += was_sent
            await rest(core)
            client.collect()
            for ahead in [proposal, *client.kept]:
                prefix = [*client.known[: ahead.base_len], *ahead.assumed_token_ids]
                session = await core.open(spec(prefix, session_id="fresh"))
                assert values(ahead) == values(await propose(session, len(prefix), [], 3))
                await session.close()
                compared += 1
            likely = [p for p in client.kept if p.base_len == len(client.known)]
            if likely and rng.random() < 0.7:
                news = list(rng.choice(likely).assumed_token_ids)
            else:
                news = [*proposal.token_ids[: rng.randrange(4)], rng.randrange(6)]
        assert client.session.committed_len == len(client.known)
        await client.session.close()
    assert hits > 20
    assert compared > 150


async def test_sessions_together_get_what_each_gets_alone(start_core, spec, own_target, kindred_target, monkeypatch):
    """Batches of branches of many sessions, of all rules, beside fresh chains."""
    look_at_all(monkeypatch)

    async def play(core, number, num_ahead_proposals):
        rng = random.Random(number)
        opening = spec(PROMPT, **KINDS[sorted(KINDS)[number // 2]], seed=number, session_id=str(number))
        target = (own_target, kindred_target)[number % 2](opening)
        client, log = Client(await core.open(opening), PROMPT), []
        _, news = target.verify()
        for _ in range(12):
            proposal, _ = await client.advance(list(news), 3, num_ahead_proposals)
            log.append((len(client.known), values(proposal)))
            await asyncio.sleep(0.01 * rng.random())
            _, news = target.verify(proposal)
        await client.session.close()
        target.close()
        return log

    numbers = range(2 * len(KINDS))
    async with start_core(k=3) as core:
        together = await asyncio.gather(*(play(core, number, number % 3 * 4) for number in numbers))
        assert core.ahead.counts.num_hits > 0
        assert together == [await play(core, number, 0) for number in numbers]
