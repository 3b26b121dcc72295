"""Requests to chunks: text, stop strings, seeds, log-probabilities, counts, refusals."""

import asyncio
import contextlib
from contextlib import nullcontext
from dataclasses import replace

import pytest

from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.target_client import TargetClient
from gateway.generation import Generation
from gateway.merging import merge
from gateway.requests.preparation import mix_seed
from gateway.requests.types import GenerationRequest
from specdec.codec import SharedTokenIds
from specdec.errors import DeadlineExceeded, InvalidRequest, NotFound, Overloaded, Unavailable
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.settings import GatewaySettings
from specdec.types import FinishReason, Verdict
from tests.gateway.conftest import router_of
from tests.gateway.fakes import FakeTargetSession


def greedy(**changes):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 40} | changes))


async def test_text_and_counts(make_generation, tokenizer, script):
    generation = make_generation()
    result = await generation.generate(GenerationRequest(prompt="Hello world!", params=greedy()))
    ids = tokenizer.encode("Hello world!")
    sample = result.samples[0]
    assert sample.token_ids == script.expect(len(ids), 40)
    assert sample.text == tokenizer.decode(sample.token_ids)
    assert result.prompt.token_ids == tuple(ids)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(ids), 40)
    assert sample.final.reason is FinishReason.LENGTH
    metrics = result.speculation
    assert metrics.num_draft_tokens > 20
    assert 0 < metrics.draft_acceptance_rate < 1
    assert metrics.mean_acceptance_length == 1 + metrics.num_accepted_draft_tokens / metrics.num_spec_steps
    assert 0 < metrics.num_rejections <= metrics.num_spec_steps


async def test_samples_share_their_prompt(make_generation, backends):
    await make_generation().generate(GenerationRequest(prompt=[5, 6, 7], params=greedy(n=3)))
    prompts = [spec.token_ids for servers in backends for spec in servers[0].specs]
    assert len(prompts) > 3
    assert all(isinstance(prompt, SharedTokenIds) and prompt is prompts[0] for prompt in prompts)


def followed(monkeypatch, *, lost_after=None):
    """Targets say of two in three verdicts that another one follows, and are lost after so many, once."""
    receive, seen = FakeTargetSession.receive, []

    async def marked(session):
        if len(seen) == lost_after:
            seen.append(None)
            raise Unavailable("lost")
        seen.append(await receive(session))
        return replace(seen[-1], is_followed=len(seen) % 3 != 0 and seen[-1].finish_reason is None)

    monkeypatch.setattr(FakeTargetSession, "receive", marked)
    return seen


async def test_verdicts_that_come_together_make_one_chunk(make_generation, monkeypatch):
    request = GenerationRequest(prompt=[5, 6], params=greedy(max_tokens=60, logprobs=1), return_token_metrics=True)
    apart, together = [], []
    for chunks in (apart, together):
        async with contextlib.aclosing(make_generation().stream(request)) as stream:
            chunks += [chunk async for chunk in stream]
        followed(monkeypatch)
    assert 2 * len(together) < len(apart)
    assert "".join(chunk.text for chunk in together) == "".join(chunk.text for chunk in apart)
    for name in ("token_ids", "logprobs"):
        assert sum((getattr(chunk, name) for chunk in together), ()) == sum((getattr(each, name) for each in apart), ())
    told, told_apart = ([each for chunk in chunks for each in chunk.token_metrics] for chunks in (together, apart))
    assert [(each.text, each.origin) for each in told] == [(each.text, each.origin) for each in told_apart]
    assert [len(chunk.token_metrics) for chunk in together] == [len(chunk.token_ids) for chunk in together]
    assert together[0].prompt is not None
    assert together[-1].final.usage == apart[-1].final.usage


@pytest.mark.parametrize("max_target_retries", [0, 2])
async def test_what_came_before_a_loss_is_not_held_back(make_generation, script, monkeypatch, max_target_retries):
    """The verdict that should have followed never comes: nothing waits for another target."""
    seen, token_ids, at_loss = followed(monkeypatch, lost_after=4), [], []
    generation = make_generation(max_target_retries=max_target_retries)
    recover = TargetClient.recover

    async def noted(client, error):
        at_loss.append((len(token_ids), 1 + sum(len(verdict.token_ids) for verdict in seen[:4])))
        await recover(client, error)

    monkeypatch.setattr(TargetClient, "recover", noted)
    with nullcontext() if max_target_retries else pytest.raises(Unavailable):
        async with contextlib.aclosing(generation.stream(GenerationRequest(prompt=[5], params=greedy()))) as chunks:
            async for chunk in chunks:
                token_ids += chunk.token_ids
    assert token_ids == script.expect(1, 40)[: len(token_ids)]
    assert len(token_ids) == 40 if max_target_retries else len(token_ids) > 4
    ((num_given, num_committed),) = at_loss
    assert num_given == num_committed


async def test_chunks_never_break_characters(make_generation, tokenizer):
    generation = make_generation()
    request = GenerationRequest(prompt=[5, 6], params=greedy(max_tokens=200))
    text = ""
    async with contextlib.aclosing(generation.stream(request)) as chunks:
        async for chunk in chunks:
            assert "\ufffd" not in chunk.text or chunk.final
            text += chunk.text
    assert "東京 🙂👩‍👩‍👧" in text


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("stop", ["jumps over", "🙂", ["nowhere", "fox j", "fox"], "e lazy dog. Gr"])
async def test_stop_strings_do_not_depend_on_rounds(make_generation, script, stop, k, include):
    generation = make_generation(num_speculative_tokens=8)
    tokenizer = generation.tokenizer
    params = greedy(max_tokens=100, stop=stop, include_stop_str_in_output=include, logprobs=0)
    request = GenerationRequest(prompt=[5], params=params, num_speculative_tokens=k)
    result = await generation.generate(request)
    sample = result.samples[0]
    stops = [stop] if isinstance(stop, str) else ["fox"]
    full = tokenizer.decode(script.expect(1, 100))
    end = full.index(stops[0])
    assert sample.text == full[: end + len(stops[0]) if include else end]
    assert (sample.final.reason, sample.final.stop_reason) == (FinishReason.STOP, stops[0])
    assert stops[0] in tokenizer.decode(sample.token_ids)
    assert stops[0] not in tokenizer.decode(sample.token_ids[:-1])
    assert result.usage.completion_tokens == len(sample.token_ids) == len(sample.logprobs)


async def test_stop_strings_wait_for_min_tokens(make_generation, tokenizer, script):
    full = tokenizer.decode(script.expect(1, 60))
    result = await make_generation().generate(
        GenerationRequest(prompt=[5], params=greedy(max_tokens=60, min_tokens=30, stop="o"))
    )
    text = result.samples[0].text
    assert full.startswith(text)
    assert full[len(text)] == "o"
    assert len(tokenizer.encode(text)) >= 29


async def test_end_of_sequence(make_generation, script, tokenizer):
    script.stop_at = 12
    generation = make_generation()
    sample = (await generation.generate(GenerationRequest(prompt=[5], params=greedy()))).samples[0]
    assert sample.token_ids == [*script.expect(1, 11), 0]
    assert sample.text == tokenizer.decode(script.expect(1, 11))
    assert (sample.final.reason, sample.final.stop_reason) == (FinishReason.STOP, None)
    shown = greedy(skip_special_tokens=False)
    assert not (await generation.generate(GenerationRequest(prompt=[5], params=shown))).samples[0].text.endswith(">")
    shown = greedy(skip_special_tokens=False, include_stop_str_in_output=True)
    text = (await generation.generate(GenerationRequest(prompt=[5], params=shown))).samples[0].text
    assert text.endswith("<|endoftext|>")
    ignoring = await generation.generate(GenerationRequest(prompt=[5], params=greedy(ignore_eos=True)))
    assert len(ignoring.samples[0].token_ids) == 40
    stop_id = script.expect(1, 8)[-1]
    own = await generation.generate(GenerationRequest(prompt=[5], params=greedy(stop_token_ids=[stop_id])))
    assert own.samples[0].final.stop_reason == stop_id


async def test_seeds(make_generation, script, backends):
    generation = make_generation()
    (target,), _ = backends

    async def run(**changes):
        params = SamplingParams(**({"max_tokens": 8} | changes))
        return (await generation.generate(GenerationRequest(prompt=[5], params=params))).samples

    assert [s.token_ids for s in await run(seed=3)] == [script.expect(1, 8, 3)]
    assert target.specs[-1].rule is Rule.COUPLED
    first, second = await run(), await run()
    assert target.specs[-1].rule is None
    assert target.specs[-1].params.seed != target.specs[-2].params.seed
    assert len(first) == len(second) == 1
    samples = await run(seed=3, n=3)
    assert [s.token_ids for s in samples] == [script.expect(1, 8, mix_seed(3, i)) for i in range(3)]
    assert len({mix_seed(3, i) for i in range(1000)}) == 1000
    assert (await run(seed=-1))[0].token_ids == script.expect(1, 8, 2**64 - 1)


async def test_a_seeded_gateway_repeats_itself(make_generation, backends):
    (target,), _ = backends
    for _ in range(2):
        generation = make_generation(seed=11)
        for _ in range(2):
            await generation.generate(GenerationRequest(prompt=[5], params=SamplingParams(max_tokens=1)))
    seeds = [spec.params.seed for spec in target.specs]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] != seeds[1]


async def test_the_request_and_the_server_choose_the_rule(make_generation, backends):
    generation = make_generation(verification=Rule.TOKEN)
    (target,), (draft,) = backends
    for rule, seed, expected in [
        (None, None, Rule.TOKEN),
        (None, 1, Rule.COUPLED),
        (Rule.BLOCK, 1, Rule.BLOCK),
        (Rule.BLOCK, None, Rule.BLOCK),
    ]:
        params = SamplingParams(max_tokens=3, seed=seed)
        await generation.generate(GenerationRequest(prompt=[5], params=params, rule=rule))
        assert target.specs[-1].rule is draft.specs[-1].rule is expected


async def test_speculation_is_limited_by_request_and_server(make_generation, backends):
    generation = make_generation(num_speculative_tokens=3)
    (target,), _ = backends
    for asked, expected in [(None, 3), (2, 2), (9, 3), (0, 0)]:
        request = GenerationRequest(prompt=[5], params=greedy(), num_speculative_tokens=asked)
        await generation.generate(request)
        assert target.specs[-1].num_speculative_tokens == expected


async def test_log_probabilities(make_generation, tokenizer, script):
    result = await make_generation().generate(
        GenerationRequest(prompt=[5, 6, 7], params=greedy(logprobs=2, prompt_logprobs=1))
    )
    sample = result.samples[0]
    assert len(sample.logprobs) == 40
    for entry, token_id in zip(sample.logprobs, sample.token_ids, strict=True):
        position = entry.position
        assert (position.token_id, position.logprob, position.rank) == (token_id, -0.5, 1)
        assert [logprob for _, logprob in position.top] == [-0.5, -1.0]
        text = tokenizer.token_text(token_id)
        if "\ufffd" not in text:
            assert sample.text[entry.text_offset :].startswith(text)
    assert [entry.token_id for entry in result.prompt.logprobs] == [6, 7]


async def test_bad_words(make_generation, backends, tokenizer):
    (target,), _ = backends
    params = greedy(bad_words=["fox", " dog"], bad_token_ids=[[9, 9]])
    await make_generation().generate(GenerationRequest(prompt=[5], params=params))
    expected = [(9, 9)]
    for word in ("fox", "dog"):
        bare = tuple(tokenizer.encode(word, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word, add_special_tokens=False))
        expected += [bare] if spaced[-len(bare) :] == bare else [bare, spaced]
    assert list(target.specs[-1].params.bad_token_ids) == expected


async def test_max_tokens_defaults_to_the_rest_of_the_context(make_generation):
    result = await make_generation().generate(GenerationRequest(prompt=[5] * 500, params=greedy(max_tokens=None)))
    assert result.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("param", "request_"),
    [
        ("prompt", GenerationRequest(prompt=[], params=greedy())),
        ("prompt", GenerationRequest(prompt="", params=greedy())),
        ("prompt", GenerationRequest(prompt=[400], params=greedy())),
        ("prompt", GenerationRequest(prompt=[5] * 512, params=greedy())),
        ("max_tokens", GenerationRequest(prompt=[5] * 500, params=greedy(max_tokens=13))),
        ("min_tokens", GenerationRequest(prompt=[5] * 500, params=greedy(max_tokens=None, min_tokens=13))),
        ("logit_bias", GenerationRequest(prompt=[5], params=greedy(logit_bias={400: 1.0}))),
        ("allowed_token_ids", GenerationRequest(prompt=[5], params=greedy(allowed_token_ids=[-1]))),
        ("stop_token_ids", GenerationRequest(prompt=[5], params=greedy(stop_token_ids=[400]))),
        ("bad_token_ids", GenerationRequest(prompt=[5], params=greedy(bad_token_ids=[[400]]))),
        ("num_speculative_tokens", GenerationRequest(prompt=[5], num_speculative_tokens=65)),
        ("session_id", GenerationRequest(prompt=[5], session_id="x" * 300)),
    ],
)
async def test_impossible_requests_are_refused_by_name(make_generation, backends, param, request_):
    with pytest.raises(InvalidRequest) as caught:
        await make_generation().generate(request_)
    assert caught.value.param == param
    assert backends[0][0].num_opened == 0


async def test_unknown_model(make_generation):
    generation = make_generation(served_model_name=("a", "b"))
    for name in ("", "a", "b"):
        assert (await generation.generate(GenerationRequest(prompt=[5], model=name))).samples
    with pytest.raises(NotFound, match="'c' does not exist here; this server has 'a', 'b'"):
        await generation.generate(GenerationRequest(prompt=[5], model="c"))


async def test_without_a_tokenizer_only_token_ids(make_generation):
    generation = make_generation()
    bare = Generation(generation.router, GatewaySettings(), None)
    result = await bare.generate(GenerationRequest(prompt=[5], params=greedy(logprobs=1)))
    assert (result.samples[0].text, len(result.samples[0].token_ids)) == ("", 40)
    for request in (
        GenerationRequest(prompt="text"),
        GenerationRequest(prompt=[5], params=greedy(stop="x")),
        GenerationRequest(prompt=[5], params=greedy(bad_words=["x"])),
    ):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await bare.generate(request)
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.text.render_chat([])


async def test_no_target_yet(tokenizer, backends, info):
    router = router_of([], [], info)
    generation = Generation(router, GatewaySettings(), tokenizer)
    assert generation.model_names == ()
    with pytest.raises(Unavailable, match="no target service has answered yet"):
        await generation.generate(GenerationRequest(prompt=[5]))


async def test_samples_close_together(make_generation, backends):
    generation = make_generation()
    (target,), (draft,) = backends
    target.latency_s = 0.001
    for stop_after in range(0, 30, 3):
        request = GenerationRequest(prompt=[5], params=greedy(n=4, max_tokens=100))
        async with contextlib.aclosing(generation.stream(request)) as chunks:
            for _ in range(stop_after):
                await anext(chunks)
        assert not target.open_sessions
        assert not draft.open_sessions
    target.faults.plan["verify"] = {target.faults.counts["verify"] + 5: ValueError("bug")}
    with pytest.raises(ValueError, match="bug"):
        await generation.generate(GenerationRequest(prompt=[5], params=greedy(n=4, max_tokens=100)))
    assert not target.open_sessions
    assert target.num_opened == target.num_closed


async def test_the_first_sample_of_a_request_has_its_name(make_generation, backends):
    generation = make_generation()
    (target,), _ = backends
    target.latency_s = 0.001
    requests = [GenerationRequest(prompt=[5], params=greedy(n=n), session_id="chat") for n in (2, 1)]
    await asyncio.gather(*(generation.generate(request) for request in requests))
    assert sorted(spec.is_named for spec in target.specs) == [False, True, True]
    assert [spec.session_id for spec in target.specs].count("/chat") == 2


async def test_deadlines(make_generation, backends):
    backends[0][0].latency_s = 0.02
    generation = make_generation(request_timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        await generation.generate(GenerationRequest(prompt=[5], params=greedy(max_tokens=200)))
    with pytest.raises(DeadlineExceeded):
        await generation.generate(GenerationRequest(prompt=[5], params=greedy(max_tokens=200), timeout_s=0.05))
    with pytest.raises(DeadlineExceeded):  # a client may ask for fewer seconds, not for more
        await generation.generate(GenerationRequest(prompt=[5], params=greedy(max_tokens=200), timeout_s=60))
    assert b'outcome="DeadlineExceeded"} 3.0' in generation.metrics.render_as("")[0]


@pytest.mark.usefixtures("virtual_time")
async def test_admission(make_generation):
    generation = make_generation(max_concurrent_sequences=2, max_queued_requests=1)
    request = GenerationRequest(prompt=[5], params=greedy(n=2), timeout_s=30.0)

    async def ask(request):
        async with generation.admission(request) as (admitted,):
            return admitted

    with pytest.raises(InvalidRequest, match="has 3 sequences; 2 are allowed"):
        await ask(replace(request, params=greedy(n=3)))
    async with generation.admission(request):
        assert generation.num_requests == 1
        waiting = asyncio.create_task(ask(request))
        await asyncio.sleep(0.05)  # virtual seconds
        with pytest.raises(Overloaded, match="2 of 2 sequences are in progress; the queue is full"):
            await ask(request)
        assert not waiting.done()
    assert (await waiting).timeout_s == pytest.approx(29.95), "what it has waited is gone"
    async with generation.admission(request):
        with pytest.raises(DeadlineExceeded, match="waited for a slot"):
            await ask(replace(request, timeout_s=0.05))
        waiting = asyncio.create_task(ask(request))
        await asyncio.sleep(0)
        generation.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting
    with pytest.raises(Unavailable, match="shutting down"):
        await ask(request)


async def test_a_tokenizer_that_is_not_the_targets_is_told(make_generation, backends, tokenizer, caplog):
    (target,), _ = backends
    target.model = replace(target.model, tokenizer_fingerprint=tokenizer.fingerprint())
    backends[1].clear()
    make_generation().check_tokenizer()
    assert not caplog.text
    target.model = replace(target.model, tokenizer_fingerprint="other")
    make_generation().check_tokenizer()
    assert "tokenizer is not that of target 'toy-model'" in caplog.text


def test_a_round_is_rejected_when_a_draft_token_is():
    metrics = SpeculationMetrics()
    for accepted, drafted in ((4, 4), (2, 4), (0, 1), (1, 1), (0, 0)):
        metrics.record(Verdict(1, 10, (7,) * (accepted + 1), num_accepted=accepted, num_draft_tokens=drafted), 0)
    assert (metrics.num_spec_steps, metrics.num_rejections) == (4, 2)
    assert SpeculationMetrics.total([metrics, metrics]).num_rejections == 4


async def test_samples_begin_in_iterations_of_their_own():
    """Each encodes its prompt: 128 of 131,000 tokens took the event loop for half a second."""
    num_iterations, begun = 0, []

    async def count():
        nonlocal num_iterations
        while True:
            num_iterations += 1
            await asyncio.sleep(0)

    async def stream():
        begun.append(num_iterations)
        yield 1

    counting = asyncio.create_task(count())
    async with contextlib.aclosing(merge([stream() for _ in range(8)])) as items:
        assert [item async for item in items] == [1] * 8
    counting.cancel()
    assert len(set(begun)) == 8
