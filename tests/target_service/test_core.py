"""Sessions on the core, without gRPC: rounds and limits against the stock model."""

import threading
import time

import numpy as np
import pytest
import torch

from engine.sampling.sparse import pack
from specdec.rules import Rule
from specdec.types import FinishReason, Proposal
from target_service import core as core_module
from target_service.verification import verifier
from tests.target_service.conftest import (
    CONTEXT,
    VOCAB,
    decode,
    make_prompt,
    make_spec,
    multi_step_decode,
    nothing_comes,
    verify,
)
from tests.until import until


def drafter(plain, prompt, *, wrong_at=()):
    """Drafts the stock model's own text, except at every ``wrong_at``-th drafted token of a round."""

    def draft(output, k):
        right = plain(prompt, len(output) + k)[len(output) :]
        return [(token + 1) % VOCAB if i in wrong_at else token for i, token in enumerate(right)]

    return draft


async def test_rounds_without_drafts_are_the_stock_model(start_core, plain):
    prompt = make_prompt(0)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 24))
        assert session.first.base_len == len(prompt)
        assert session.first.committed_len == len(prompt) + 1
        assert await decode(session) == plain(prompt, 24)
        await session.close()


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("wrong_at", [(), (0,), (1,), (2, 5), (7,)])
async def test_drafts_right_wrong_and_partly_right_change_nothing(start_core, plain, k, wrong_at):
    prompt = make_prompt(k)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 30))
        assert await decode(session, k=k, draft=drafter(plain, prompt, wrong_at=wrong_at)) == plain(prompt, 30)
        await session.close()


async def test_a_verdict_tells_what_was_accepted_and_the_cache_keeps_just_that(start_core, plain):
    prompt = make_prompt(3)
    text = plain(prompt, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 20))
        n = session.first.committed_len
        cache = session.step_session.sequence
        assert cache.length == n - 1
        wrong = (text[3] + 1) % VOCAB
        verdict = await verify(session, n, Proposal(1, n, (*text[1:3], wrong, 5)))
        assert (verdict.base_len, verdict.token_ids) == (n, text[1:4])
        assert (verdict.num_accepted, verdict.num_draft_tokens) == (2, 4)
        assert cache.length == verdict.committed_len - 1 == n + 2
        verdict = await verify(session, n + 3, Proposal(1, n + 3, text[4:8]))
        assert verdict.token_ids == text[4:9]
        assert verdict.num_accepted == 4
        assert cache.length == verdict.committed_len - 1
        timings = verdict.timings
        assert timings.forward_ns > 0
        assert timings.verify_ns > 0
        assert (timings.batch_sessions, timings.batch_rows) == (1, 5)
        assert session.opened.prefill_ns > timings.forward_ns / 10
        await session.close()


async def test_verdicts_tell_what_the_sessions_of_other_pacing_groups_get(start_core):
    """Not those of the own group, nor what others got before the session was opened."""

    async def step(session):
        verdict = await verify(session, session.committed_len)
        return verdict.timings.others_tokens, verdict.timings.others_ns

    async with start_core() as core:
        first, second, other = [
            await core.open(make_spec(make_prompt(seed), 20, pacing_group=group))
            for seed, group in enumerate(("one", "one", "two"))
        ]
        assert [await step(first), await step(second)] == [(0, 0), (0, 0)], "the prompt's end is no step"
        began_ns = time.perf_counter_ns()
        assert (await step(other))[0] == 2
        assert (await step(other))[0] == 2
        num_tokens, spent_ns = await step(first)
        assert num_tokens == 2
        assert spent_ns > 0
        late = await core.open(make_spec(make_prompt(3), 20, pacing_group="one"))
        assert (await step(late)) == (0, 0)
        assert (await step(other))[0] == 4
        assert (await step(late))[0] == 1
        assert (await step(late))[1] < time.perf_counter_ns() - began_ns
        for session in (first, second, other, late):
            await session.close()


@pytest.mark.parametrize(
    ("limit_ns", "brings_threads", "thread"),
    [(10**12, True, "MainThread"), (0, True, "target-device"), (10**12, False, "target-device")],
)
async def test_short_steps_of_rounds_run_on_the_event_loop(  # noqa: PLR0917 (fixtures and parameters)
    start_core, plain, monkeypatch, limit_ns, brings_threads, thread
):
    """Where the kernels belong to no thread; the first step of a size, prompts and multi-step decode never do."""
    prompt, threads = make_prompt(6), []
    run_steps = core_module.run_steps

    def noted(engine, verifier, parts, *args):
        threads.append((parts[0].is_round, threading.current_thread().name))
        return run_steps(engine, verifier, parts, *args)

    monkeypatch.setattr(core_module, "run_steps", noted)
    monkeypatch.setattr(core_module, "MAX_INLINE_NS", limit_ns)
    async with start_core() as core:
        monkeypatch.setattr(type(core.engine.runner), "brings_threads", brings_threads)
        session = await core.open(make_spec(prompt, 30))
        output = [*session.first.token_ids]
        for _ in range(3):
            n = len(prompt) + len(output)
            output += (
                await verify(session, n, Proposal(1, n, plain(prompt, 30)[len(output) : len(output) + 3]))
            ).token_ids
        output += await multi_step_decode(session, len(prompt) + len(output), 5)
        assert tuple(output) == plain(prompt, len(output))
        await session.close()
    rounds = [name for is_round, name in threads if is_round]
    assert (rounds[0], {name for is_round, name in threads if not is_round}) == ("target-device", {"target-device"})
    assert set(rounds[1:]) == {thread}


async def test_multi_step_decode_is_the_same_text(start_core, plain):
    prompt = make_prompt(5)
    text = plain(prompt, 40)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 40))
        tokens = list(session.first.token_ids)
        while len(tokens) < 40:
            n = len(prompt) + len(tokens)
            decoded = await multi_step_decode(session, n, 7)
            assert len(decoded) == min(7, 40 - len(tokens))
            tokens += decoded
        assert tuple(tokens) == text
        assert session.finish_reason is FinishReason.LENGTH
        await session.close()


async def test_multi_step_from_the_first_token_and_then_rounds(start_core, plain):
    prompt = make_prompt(6)
    text = plain(prompt, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 20, multi_step_tokens=6))
        n = len(prompt) + 1
        await until(lambda: session.committed_len == n + 6)  # without being asked
        session.offer(Proposal(1, n, (1,)))  # too late
        tokens = await multi_step_decode(session, n, 6)
        assert (await verify(session, n + 6, Proposal(1, n + 6, text[7:10]))).token_ids == text[7:11]
        assert tokens == text[1:7]
        session.multi_step_decode(n + 6, 3)  # a round lies between
        await nothing_comes(session)
        load = await core.load()
        assert (load.stale_messages, load.superseded_proposals) == (1, 1)
        await session.close()


async def test_verdicts_that_wait_are_joined(start_core, plain):
    prompt = make_prompt(6)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 9, multi_step_tokens=8, logprobs=1))
        n = len(prompt) + 1
        await until(lambda: session.finish_reason is not None)
        verdict = await session.receive()
        assert (verdict.base_len, verdict.token_ids) == (n, plain(prompt, 9)[1:])
        assert [entry.token_id for entry in verdict.logprobs] == list(verdict.token_ids)
        assert verdict.finish_reason is FinishReason.LENGTH
        assert verdict.timings.batch_rows == 1
        await session.close()


async def test_more_may_be_asked_for_before_all_was_fetched(start_core, plain):
    prompt = make_prompt(7)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 30))
        n = session.first.committed_len
        session.multi_step_decode(n, 5)
        tokens = (await session.receive()).token_ids
        session.multi_step_decode(n + len(tokens), 11 - len(tokens))
        while len(tokens) < 11:
            tokens += (await session.receive()).token_ids
        assert tokens == plain(prompt, 12)[1:]
        await session.close()


@pytest.mark.parametrize("k", [0, 4])
async def test_a_stop_token_cuts_the_round(start_core, plain, k):
    prompt = make_prompt(9)
    text = plain(prompt, 40)
    where = next(i for i in range(6, 40) if text[i] not in text[:i])
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 40, stop_token_ids=[text[where]]))
        assert await decode(session, k=k, draft=drafter(plain, prompt)) == text[: where + 1]
        assert session.finish_reason is FinishReason.STOP
        assert session.step_session.sequence.length == session.committed_len - 1
        session.offer(Proposal(1, session.committed_len, ()))
        await nothing_comes(session)
        await session.close()


async def test_the_verdict_names_the_stop_token_inside_an_accepted_block(start_core, plain):
    prompt = make_prompt(10)
    text = plain(prompt, 10)
    stop = next(t for t in text[2:5] if t not in text[:2])
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 10, stop_token_ids=[stop]))
        n = session.first.committed_len
        verdict = await verify(session, n, Proposal(1, n, text[1:9]))
        assert verdict.token_ids == text[1 : text.index(stop) + 1]
        assert (verdict.finish_reason, verdict.stop_token_id) == (FinishReason.STOP, stop)
        await session.close()


async def test_min_tokens_holds_stop_tokens_back(start_core, plain):
    prompt = make_prompt(11)
    first = plain(prompt, 1)[0]
    async with start_core() as core:
        spec = make_spec(prompt, 20, stop_token_ids=[first], min_tokens=5)
        session = await core.open(spec)
        tokens = await decode(session)
        assert first not in tokens[:5]
        await session.close()
        session = await core.open(make_spec(prompt, 20, stop_token_ids=[first]))
        assert session.first.finish_reason is FinishReason.STOP
        assert session.first.token_ids == (first,)
        await session.close()


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6])
async def test_max_tokens_drops_surplus_drafts_before_the_forward_pass(start_core, plain, max_tokens):
    prompt = make_prompt(12)
    text = plain(prompt, 14)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, max_tokens))
        verdict, tokens = session.first, list(session.first.token_ids)
        while verdict.finish_reason is None:
            n, done = len(prompt) + len(tokens), len(tokens)
            verdict = await verify(session, n, Proposal(1, n, text[done : done + 4]))
            assert verdict.num_draft_tokens == min(4, max_tokens - done - 1)
            tokens += verdict.token_ids
        assert tuple(tokens) == text[:max_tokens]
        assert verdict.finish_reason is FinishReason.LENGTH
        await session.close()


async def test_the_context_ends_the_sequence(start_core, plain):
    prompt = make_prompt(13, CONTEXT - 6)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 500))
        assert await decode(session, k=4, draft=drafter(plain, prompt)) == plain(prompt, 6)
        assert session.finish_reason is FinishReason.LENGTH
        assert session.committed_len == CONTEXT
        await session.close()


async def test_a_session_moves_here_with_what_it_has_generated(start_core, plain):
    prompt = make_prompt(14)
    text = plain(prompt, 20)
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 20, generated=text[:7], epoch=3))
        assert session.opened.epoch == session.first.epoch == 3
        assert await decode(session) == text[7:]
        await session.close()


async def test_penalties_see_the_output_whatever_the_rounds(start_core):
    prompt = make_prompt(15)
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    async with start_core() as core:
        session = await core.open(make_spec(prompt, 30, **penalties))
        text = await decode(session)
        await session.close()
        session = await core.open(make_spec(prompt, 30, generated=text[:11], **penalties))
        right = lambda output, k: text[11 + len(output) :][:k]  # noqa: E731
        assert await decode(session, k=4, draft=right) == text[11:]
        await session.close()


@pytest.mark.parametrize("rule", list(Rule))
async def test_every_rule_runs_with_and_without_q(start_core, rule):
    prompt = make_prompt(16)
    async with start_core() as core:
        for with_q in (False, True):
            session = await core.open(make_spec(prompt, 40, temperature=1.0, rule=rule))
            assert session.opened.rule is rule
            n, last = session.first.committed_len, session.first
            while last.finish_reason is None:
                ids = (3, 9, 27)
                rows = tuple(pack(np.array([t, (t + 1) % VOCAB]), np.array([15, 0])) for t in ids) if with_q else ()
                last = await verify(session, n, Proposal(1, n, ids, q_rows=rows))
                n = last.committed_len
            assert n == len(prompt) + 40
            await session.close()


async def test_coupled_text_depends_on_the_seed_alone(start_core):
    prompt = make_prompt(17)

    async def text(core, k, **changes):
        session = await core.open(make_spec(prompt, 40, temperature=1.0, rule=Rule.COUPLED, **changes))
        generator = torch.Generator().manual_seed(5)
        draft = lambda _, k: torch.randint(0, VOCAB, (k,), generator=generator).tolist()  # noqa: E731
        tokens = await decode(session, k=k, draft=draft)
        await session.close()
        return tokens

    async with start_core() as core:
        plain_text = await text(core, 0)
        assert await text(core, 5) == plain_text
        assert await text(core, 5, seed=2) != plain_text


@pytest.mark.parametrize("budget", [512, 40])
async def test_log_probabilities(start_core, llama, budget):
    prompt = make_prompt(18, 100)
    async with start_core(max_num_batched_tokens=budget) as core:
        session = await core.open(make_spec(prompt, 4, logprobs=3, prompt_logprobs=2))
        first, second = session.first, await verify(session, 101, Proposal(1, 101, (1, 2)))
        ids = torch.tensor([[*prompt, *first.token_ids, *second.token_ids]])
        with torch.inference_mode():
            wanted = llama(ids).logits[0].log_softmax(-1)
        got = (*session.opened.prompt_logprobs, *first.logprobs, *second.logprobs)
        assert len(session.opened.prompt_logprobs) == 99
        assert len(got) == ids.shape[1] - 1
        for position, entry in enumerate(got):
            token = int(ids[0, position + 1])
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(wanted[position, token]), abs=1e-4)
            assert len(top := list(entry.top)) == (2 if position < 99 else 3)
            assert top[0][0] == int(wanted[position].argmax())
        await session.close()


async def test_verification_has_the_threads_of_the_forward_pass(start_core, monkeypatch):
    """Torch is left with one thread where the kernels run whole passes; that says nothing of theirs."""
    verify_rounds, seen = verifier.verify_rounds, set()

    def watched(*args, num_threads):
        seen.add(num_threads)
        return verify_rounds(*args, num_threads=num_threads)

    monkeypatch.setattr(verifier, "verify_rounds", watched)
    async with start_core(num_threads=2) as core:
        session = await core.open(make_spec(make_prompt(4), 4))
        assert (core.engine.runner.name, core.engine.num_threads) == ("native decoder", 2)
        assert seen == {2}
        await session.close()


async def test_the_load_says_how_long_batches_took(start_core):
    async with start_core() as core:
        before = await core.load()
        session = await core.open(make_spec(make_prompt(4), 4))
        verdict = await verify(session, session.first.committed_len)
        after = await core.load()
        assert after.num_batches - before.num_batches == 2 == core.num_steps
        spent_ns = sum(v.timings.forward_ns + v.timings.verify_ns for v in (session.first, verdict))
        assert after.busy_ns - before.busy_ns == spent_ns
        await session.close()
