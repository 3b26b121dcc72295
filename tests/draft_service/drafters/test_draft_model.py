"""The draft model against the stock model's own continuation, and against a target that judges it."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from draft_service.core import DraftCore
from draft_service.drafters.base import DraftJob
from draft_service.drafters.draft_model import ModelDrafter
from engine.device_thread import DeviceThread
from engine.engine import Engine
from engine.loading.load import load_engine
from engine.native.decoder import NativeDecoder
from engine.sampling.drafting import draft
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.sparse import unpack
from engine.sampling.state import SamplingState
from specdec.rules import Rule
from specdec.settings import DraftSettings, ModelSettings, SpeculativeSettings
from tests.draft_service.proposing import propose

PROMPT = [3, 14, 15, 9, 26, 5]


def others(rng, count, but=None):
    """Random tokens, the first of them not ``but``."""
    tokens = [rng.randrange(48) for _ in range(count)]
    if tokens and tokens[0] == but:
        tokens[0] = (tokens[0] + 1) % 48
    return tokens


async def test_continuation_after_every_kind_of_verdict(start_core, spec, greedy):
    """Each proposal is the model's own greedy continuation, whatever the verdict before it was."""
    rng = random.Random(0)
    async with start_core(k=8) as core:
        session = await core.open(spec(PROMPT))
        known, drafted = list(PROMPT), ()
        kinds = Counter()
        for round_number in range(60):
            kind = ("none", "partial", "all", "catch-up", "ahead", "alone", "shorter")[round_number % 7]
            match kind:
                case "none":  # the first draft is rejected
                    new = others(rng, 1, but=drafted[0] if drafted else None)
                case "partial":
                    accepted = rng.randrange(1, max(2, len(drafted)))
                    new = [*drafted[:accepted], *others(rng, 1, but=drafted[accepted : accepted + 1] or None)]
                case "all":  # everything, and a token the draft has not seen
                    new = [*drafted, *others(rng, 1)]
                case "catch-up":  # the draft was away while the target decoded
                    new = others(rng, 40)
                case "ahead":  # the target decoded on and agrees with the drafts for a while
                    new = [*drafted, *greedy([*known, *drafted], 3), *others(rng, 2)]
                case "alone":  # nothing but the drafts: the cache lacks only the last one
                    new = [*drafted]
                case "shorter":  # a verdict that was cut
                    new = [*drafted[:2]]
            kinds[kind] += bool(new)
            k = rng.randrange(1, 9)
            proposal = await propose(session, len(known), new, k)
            known += new
            drafted = proposal.token_ids
            assert proposal.base_len == len(known)
            assert drafted == greedy(known, k), (round_number, kind)
            assert proposal.q_rows == ()
        assert min(kinds.values()) >= 4
        await session.close()


@pytest.fixture
def accepted_per_round(start_core, spec, make_target, target_engine):
    """``await accepted_per_round(k, rule)``: 200 rounds of a draft against a target with the same weights."""

    async def run(k, rule, **params):
        opening = spec(PROMPT, rule=rule, max_tokens=1900, temperature=0.0 if rule is None else 1.0, **params)
        target = make_target(target_engine, opening)
        accepted = []
        async with start_core(k=k) as core:
            session = await core.open(opening)
            _, news = target.verify()
            for _ in range(200):
                proposal = await propose(session, len(target.state) - len(news), news, k)
                assert len(proposal.token_ids) == k
                count, news = target.verify(proposal)
                accepted.append(count)
            await session.close()
        target.close()
        return accepted

    return run


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("rule", [None, Rule.COUPLED], ids=["greedy", "coupled"])
async def test_the_targets_own_model_is_accepted_every_time(accepted_per_round, k, rule):
    """Draft = target: all k drafts of all 200 rounds. A feed forgotten anywhere shows here."""
    assert await accepted_per_round(k, rule) == [k] * 200


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_ratio_rules_accept_the_targets_own_model(accepted_per_round, rule):
    """All but what rounding q to the weights that travel costs, about one token in a hundred."""
    assert sum(await accepted_per_round(4, rule)) > 0.95 * 4 * 200


@pytest.mark.parametrize("rule", [None, Rule.COUPLED], ids=["greedy", "coupled"])
async def test_penalties_and_truncation_are_applied_to_drafted_positions(accepted_per_round, rule):
    params = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "top_k": 20,
        "top_p": 0.9,
        "bad_token_ids": [[4, 5], [9]],
        "logit_bias": {7: 2.0},
    }
    assert await accepted_per_round(4, rule, **params) == [4] * 200


async def test_a_starved_draft_is_noticed(accepted_per_round, monkeypatch):
    """Planted bug: x_k is taken for fed although it never was."""

    class Starved(ModelDrafter):
        async def draft(self, batch):
            drafts = await super().draft(batch)
            for job in batch:
                if job.num_tokens:
                    job.state.cache.sequence.length += 1
            return drafts

    monkeypatch.setattr("draft_service.drafters.draft_model.ModelDrafter", Starved)
    assert sum(await accepted_per_round(4, Rule.COUPLED)) < 0.9 * 4 * 200


async def check_coupled_text(start, make_target, engine, opening):
    """With real disagreements all along, the coupled text is what the target writes alone."""
    alone, target = make_target(engine, opening), make_target(engine, opening)
    while len(alone.state) < 300:
        alone.verify()
    total = 0
    async with start(k=4) as core:
        session = await core.open(opening)
        _, news = target.verify()
        while len(target.state) < 300:
            proposal = await propose(session, len(target.state) - len(news), news, 4)
            count, news = target.verify(proposal)
            total += count
        await session.close()
    assert target.state.token_ids[:300] == alone.state.token_ids[:300]
    assert total > 0
    alone.close()
    target.close()


async def test_another_model_is_accepted_sometimes_and_text_is_the_targets(start_core, spec, make_target, other_engine):
    opening = spec(PROMPT, rule=Rule.COUPLED, temperature=1.0)
    await check_coupled_text(start_core, make_target, other_engine, opening)


async def run_session(core, opening, rounds, seed):
    """Drive one session with verdicts that depend on its seed alone; returns everything that was proposed."""
    rng = random.Random(seed)
    session = await core.open(opening)
    length, drafted, log = len(opening.token_ids), (), []
    for _ in range(rounds):
        new = [*drafted[: rng.randrange(len(drafted) + 1)], *others(rng, rng.choice([1, 1, 1, 30]))]
        proposal = await propose(session, length, new, rng.randrange(1, 7))
        length += len(new)
        drafted = proposal.token_ids
        log.append((proposal.base_len, proposal.token_ids, proposal.q_rows))
        await asyncio.sleep(0)
    await session.close()
    return log


async def test_batched_is_what_single_is(start_core, spec):
    """Sessions of every rule and k, together and alone."""
    rng = random.Random(3)
    openings = []
    for i in range(12):
        rule = (None, Rule.COUPLED, Rule.BLOCK, Rule.TOKEN)[i % 4]
        prompt = others(rng, rng.choice([1, 5, 60, 300]))
        params = {"temperature": 0.0 if rule is None else 0.8, "seed": i, "rule": rule, "session_id": str(i)}
        if i % 3 == 0:
            params |= {"presence_penalty": 0.5, "top_k": 10}
        openings.append(spec(prompt, **params))
    async with start_core(k=6, scheduler={"max_num_batched_tokens": 64}) as core:
        together = await asyncio.gather(*(run_session(core, opening, 15, i) for i, opening in enumerate(openings)))
        for i, opening in enumerate(openings):
            alone = await run_session(core, opening, 15, i)
            assert [(base, ids) for base, ids, _ in together[i]] == [(base, ids) for base, ids, _ in alone]
            assert [rows for _, _, rows in together[i]] == [rows for _, _, rows in alone]


def chi_square(counts, row, total):
    """p-value of observed counts under a q row; tokens expected fewer than 5 times are pooled.

    0 where a token was drawn that the row does not hold.
    """
    token_ids, weights = unpack(row)
    expected = dict(zip(token_ids.tolist(), (total * weights / weights.sum()).tolist(), strict=True))
    if not set(counts) <= set(expected):
        return 0.0
    large = [token for token, count in expected.items() if count >= 5]
    observed = [counts[token] for token in large]
    wanted = [expected[token] for token in large]
    if (rest := total - sum(wanted)) > 1e-6 * total:
        observed.append(total - sum(observed))
        wanted.append(rest)
    return stats.chisquare(observed, wanted, sum_check=False).pvalue


async def draws_and_row(core, spec, num_sessions, position):
    """The drafted token at one position over many seeds, given the same context, and the q row that came with it."""
    counts, rows = Counter(), set()
    openings = [
        spec([*PROMPT, 1, 2], rule=Rule.TOKEN, temperature=1.0, seed=seed, session_id=str(seed), max_tokens=8)
        for seed in range(num_sessions)
    ]
    for start in range(0, num_sessions, 100):
        sessions = await asyncio.gather(*(core.open(opening) for opening in openings[start : start + 100]))
        proposals = await asyncio.gather(*(propose(session, 8, [], position + 1) for session in sessions))
        for proposal in proposals:
            counts[proposal.token_ids[position]] += 1
            rows.add(proposal.q_rows[position])
        await asyncio.gather(*(session.close() for session in sessions))
    return counts, rows


async def draws_after_states(drafter, spec, token_ids, states, position, *, is_chain=False):
    """The token drafted at one position by 800 seeds, and the q rows that came with it; of a chain, by the tokens
    before it.
    """
    counts, rows = {}, {}
    for start in range(0, 800, 40):
        openings = [
            spec(token_ids[:-1], rule=Rule.TOKEN, temperature=1.0, seed=seed, session_id=str(seed), max_tokens=8)
            for seed in range(start, start + 40)
        ]
        opened = [drafter.open(opening) for opening in openings]
        for state in opened:
            drafter.advance(state, len(token_ids) - 1, token_ids[-1:], states)
        for draft_ in await drafter.draft([DraftJob(state, state.num_pending, position + 1) for state in opened]):
            before = draft_.token_ids[:position] if is_chain else ()
            counts.setdefault(before, Counter())[draft_.token_ids[position]] += 1
            assert rows.setdefault(before, draft_.q_rows[position]) == draft_.q_rows[position]
        for state in opened:
            drafter.close(state)
    return counts, rows


async def test_q_rows_are_what_tokens_were_drawn_from(start_core, spec):
    async with start_core(k=2) as core:
        counts, rows = await draws_and_row(core, spec, 3000, 0)
    (row,) = rows
    assert len(unpack(row)[0]) > 5
    assert chi_square(counts, row, 3000) > 1e-4


async def test_q_rows_that_lie_are_noticed(start_core, spec, monkeypatch):
    """Planted bug: tokens drawn at temperature 1, rows sent for temperature 0.6."""

    def lying(logits, rows, rules):
        drawn = draft(logits, rows, rules)
        sharper = draft(logits / 0.6, rows, rules)
        return type(drawn)(drawn.token_ids, sharper.q_token_ids, sharper.q_weights)

    monkeypatch.setattr("engine.chains.draft", lying)
    async with start_core(k=2, model={"enforce_eager": True}) as core:
        counts, rows = await draws_and_row(core, spec, 3000, 0)
    assert chi_square(counts, next(iter(rows)), 3000) < 1e-6


async def test_coupled_draws_share_the_targets_noise(start_core, spec, llama):
    """The drafted token is the argmin of E_v / q_v with the noise of its own position."""
    async with start_core(k=1) as core:
        for seed in range(5):
            opening = spec(PROMPT, rule=Rule.COUPLED, temperature=1.0, seed=seed)
            session = await core.open(opening)
            (token,) = (await propose(session, 6, [11, 12], 1)).token_ids
            await session.close()
            state = SamplingState(opening.params, [*PROMPT, 11, 12], 6, 48)
            with torch.inference_mode():
                logits = llama(torch.tensor([state.token_ids])).logits[:, -1].float()
                expected = draft(logits, Rows.after([state]), [Rule.COUPLED]).token_ids.item()
            assert token == expected
            assert state.noise_key(Stream.COUPLING, 8) != state.noise_key(Stream.COUPLING, 7)


async def test_a_long_prompt_does_not_stall_the_others(start_core, spec):
    """While 1,500 tokens are ingested by chunks, another session gets proposal after proposal."""
    async with start_core(k=2, scheduler={"max_num_batched_tokens": 64}) as core:
        session = await core.open(spec([1, 2, 3]))
        opening = asyncio.create_task(core.open(spec([i % 48 for i in range(1500)], session_id="long", max_tokens=8)))
        length = proposals = 3
        while not opening.done():
            proposal = await propose(session, length, [5], 2)
            length += 1
            proposals += len(proposal.token_ids) == 2
        assert proposals >= 1500 // 64
        await (await opening).close()
        await session.close()


async def test_at_the_context_limit_fewer_then_nothing(start_core, spec, greedy):
    async with start_core(k=4, model={"max_model_len": 64}) as core:
        known = [i % 48 for i in range(60)]
        session = await core.open(spec(known, max_tokens=500))
        sizes = []
        for _ in range(6):
            proposal = await propose(session, len(known), [7], 4)
            known.append(7)
            sizes.append(len(proposal.token_ids))
            assert proposal.token_ids == greedy(known, sizes[-1])
        # n committed tokens and k drafts need n + k - 1 entries of 64.
        assert sizes == [4, 3, 2, 1, 0, 0]
        await session.close()
        longer = await core.open(spec([1] * 70, max_tokens=500))
        assert (await propose(longer, 70, [1], 4)).token_ids == ()
        await longer.close()


async def test_a_session_larger_than_the_whole_cache_gets_what_there_is(start_core, spec):
    async with start_core(k=4, model={"kv_cache_memory_bytes": 1 << 17, "max_model_len": 128}) as core:
        assert (await core.info()).kv_cache_tokens < 100_000
        session = await core.open(spec([1, 2, 3], max_tokens=100_000))
        assert len((await propose(session, 3, [4], 4)).token_ids) == 4
        await session.close()


async def test_nothing_beyond_the_last_useful_token(start_core, spec):
    """The target adds one token itself: with r tokens left, r - 1 drafts are enough."""
    async with start_core(k=4) as core:
        session = await core.open(spec(PROMPT, max_tokens=5))
        sizes = [len((await propose(session, 6 + i, [1], 4)).token_ids) for i in range(5)]
        assert sizes == [3, 2, 1, 0, 0]
        await session.close()


async def test_padded_vocabulary_is_never_proposed(checkpoint, spec):
    """Rows of the output layer beyond the tokenizer are masked, even where they would win."""
    settings = DraftSettings(
        speculative=SpeculativeSettings(model=checkpoint, num_speculative_tokens=4),
        model=ModelSettings(model=checkpoint, num_threads=1, kv_cache_memory_bytes=1 << 20),
    )
    thread = DeviceThread()
    engine = await thread.run(load_engine, settings.model)
    engine.info = replace(engine.info, tokenizer_size=3)
    core = DraftCore(ModelDrafter(engine, thread, settings), settings.scheduler)
    for params in ({}, {"temperature": 1.0, "rule": Rule.BLOCK}, {"temperature": 1.0, "rule": Rule.COUPLED}):
        session = await core.open(spec([1, 2, 0], **params))
        for i in range(10):
            proposal = await propose(session, 3 + i, [1], 4)
            assert len(proposal.token_ids) == 4
            assert max(proposal.token_ids) < 3
        await session.close()
    await core.close()


@pytest.mark.parametrize("native", [True, False])
async def test_an_error_in_a_forward_pass_leaves_the_sessions_intact(start_core, spec, greedy, monkeypatch, native):
    async with start_core(k=4, model={"enforce_eager": not native}) as core:
        session = await core.open(spec(PROMPT))
        owner, name, breaks_at = (NativeDecoder, "check", 1) if native else (Engine, "forward", 3)
        whole, calls = getattr(owner, name), []

        def failing(self, argument):
            calls.append(argument)
            if len(calls) == breaks_at:
                raise RuntimeError("planted")
            return whole(self, argument)

        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(RuntimeError, match="planted"):
            await propose(session, 6, [1, 2], 4)
        assert (await propose(session, 6, [1, 2], 4)).token_ids == greedy([*PROMPT, 1, 2], 4)
        await session.close()


async def test_sessions_with_fewer_tokens_leave_the_batch(start_core, spec, monkeypatch):
    async with start_core(k=6, model={"enforce_eager": True}) as core:
        drafter = core.drafter
        sizes = []
        forward = Engine.forward
        monkeypatch.setattr(
            Engine, "forward", lambda self, segments: sizes.append(len(segments)) or forward(self, segments)
        )
        states = [drafter.open(spec(PROMPT, session_id=str(i))) for i in range(3)]
        jobs = [DraftJob(state, 6, k) for state, k in zip(states, (1, 6, 3), strict=True)]
        drafts = await drafter.draft(jobs)
        assert [len(d.token_ids) for d in drafts] == [1, 6, 3]
        assert sizes == [3, 2, 2, 1, 1, 1]
        for state in states:
            drafter.close(state)
