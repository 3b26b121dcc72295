"""A target that decodes beside a draft far away: the text is the same whatever comes, and whenever."""

import asyncio
import random
import time

import grpc.aio
import pytest

from engine.engine import Engine
from engine.native.runner import NativeRunner
from specdec.rpc.server import RpcServer
from specdec.rules import Rule
from specdec.settings import ServerSettings
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import draft_service_pb2_grpc as draft_grpc
from specdec.v1 import types_pb2 as types_pb
from target_service.scheduler.round_coalescer import RoundCoalescer
from target_service.session.session import Session
from target_service.trip_times import TripTimes
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, multi_step_decode, until_clean
from tests.target_service.test_direct_draft import K, ScriptedDraft, opening_of, serving_draft, session, tokens_of
from tests.until import until

NUM_TOKENS = 100


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Every draft is far away, from its first answer on, and on another machine."""
    init = TripTimes.__init__
    monkeypatch.setattr(TripTimes, "__init__", lambda times, **_: init(times))
    monkeypatch.setattr("target_service.trip_times.LEAST", 1)
    monkeypatch.setattr("target_service.trip_times.STREAMS_FROM", -1.0)
    monkeypatch.setattr("target_service.trip_times.WAITS_BELOW", -1.0)


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Steps take a while, on their own thread: the event loop, which the draft uses as well, is free."""
    forward = Engine.forward

    def forward_slowly(engine, segments):
        time.sleep(0.003)
        return forward(engine, segments)

    monkeypatch.setattr(Engine, "forward", forward_slowly)
    monkeypatch.setattr(NativeRunner, "brings_threads", False)


class StreamingDraft(ScriptedDraft):
    """A draft that knows the text, but for some positions, and writes on."""

    def __init__(self, prompt, text, *, wrong=(), pause=lambda: 0.0):
        super().__init__(None)
        self.text = (*prompt, *text)
        self.wrong = wrong
        self.pause = pause
        #: Whether it keeps to the limit it is told.
        self.is_greedy = False
        self.may_open = asyncio.Event()
        self.may_open.set()
        #: What the advances asked for: tokens of a proposal, and of the stream.
        self.asked = []

    def drafts(self, start, count):
        right = self.text[start : start + count]
        return [(token + 1) % VOCAB if start + i in self.wrong else token for i, token in enumerate(right)]

    async def Draft(self, request_iterator, context):
        opening = (await context.read()).open
        self.opened += 1
        self.tasks.append(asyncio.current_task())
        known, tail, chain, changed = [*opening.token_ids], [], 0, asyncio.Event()
        is_asked = False

        async def read():
            nonlocal chain, is_asked
            while (request := await context.read()) is not grpc.aio.EOF:
                advance = request.advance
                assert advance.base_len == len(known)
                news = [*advance.token_ids]
                known.extend(news)
                self.asked.append((advance.num_draft_tokens, advance.stream_tokens))
                if advance.stream_tokens and tail[: len(news)] == news and len(news) <= len(tail):
                    del tail[: len(news)]
                else:
                    tail.clear()
                    chain += 1
                is_asked = True
                changed.set()

        reading = asyncio.create_task(read())
        try:
            await self.may_open.wait()
            opened = draft_pb.DraftSessionOpened(epoch=opening.epoch, num_speculative_tokens=K, streams=True)
            await context.write(draft_pb.DraftResponse(opened=opened))
            while True:
                k, ahead = self.asked[-1] if self.asked else (0, 0)
                room = K if self.is_greedy else min(k, ahead - len(tail)) if ahead else k * is_asked
                if room <= 0:
                    changed.clear()
                    await changed.wait()
                    continue
                is_asked, base_len = False, len(known) + len(tail)
                token_ids = self.drafts(base_len, room)
                tail += token_ids if ahead else []
                if token_ids or not ahead:
                    parts = {"epoch": opening.epoch, "base_len": base_len, "token_ids": token_ids, "chain": chain}
                    await context.write(draft_pb.DraftResponse(proposal=types_pb.Proposal(**parts, draft_ns=5)))
                await asyncio.sleep(self.pause())
        finally:
            reading.cancel()
            self.ended += 1


async def drafted(client, address, text, act=lambda _: None):
    """The verdicts of a session whose draft is at an address: they have the text. ``act`` is called with each."""
    await client.use_draft(address)
    verdicts = await client.rest(act)
    assert tokens_of(client.first, verdicts) == text
    assert all(verdict.drafted for verdict in verdicts if verdict.num_draft_tokens)
    return verdicts


GREEDY, COUPLED = {}, {"temperature": 1.0, "rule": Rule.COUPLED}


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (2, 3))])
async def test_the_text_is_the_same_whatever_is_streamed_and_when(start_core, serve, tmp_path, params, seed):
    dice, prompt = random.Random(seed), make_prompt(seed)
    async with start_core() as core:
        alone = await core.open(make_spec(prompt, NUM_TOKENS, **params))
        rest = await multi_step_decode(alone, alone.first.committed_len, NUM_TOKENS - 1)
        text = (*alone.first.token_ids, *rest)
        await alone.close()
    wrong = {i for i in range(len(prompt) + NUM_TOKENS) if dice.random() < 0.1 * seed}
    draft = StreamingDraft(prompt, text, wrong=wrong, pause=lambda: dice.choice((0.0, 0.0, 0.002)))
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS, **params) as client:
            verdicts = await drafted(client, address, text)
        assert all(verdict.num_draft_tokens <= K for verdict in verdicts)
        streamed = [verdict for verdict in verdicts if verdict.num_multi_step_left and verdict.drafted]
        assert sum(verdict.num_accepted for verdict in streamed) > 5
        assert {verdict.drafted.num_asked for verdict in streamed} == {K}
        assert not client.told
        assert (await core.load()).stale_messages == 0
        await until_clean(core)


async def test_a_stream_ends_and_begins_again(start_core, serve, plain, tmp_path):
    """By the gateway's choice, of whether, not how much: a step verifies all that is there."""
    prompt = make_prompt(7)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, pause=lambda: 0.001)
    lengths = iter([*[K] * 8, *[0] * 8, *[2, 2, 2, 0] * NUM_TOKENS])
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await drafted(client, address, text, lambda _: client.draft(next(lengths)))
        ways = [ahead > 0 for k, ahead in draft.asked]
        assert {k for k, ahead in draft.asked if ahead} == {K}
        assert True in ways[draft.asked.index((0, 0)) :]
        await until_clean(core)


async def test_a_step_waits_for_a_chain_that_is_due(start_core, serve, plain, tmp_path, monkeypatch):
    """After each wrong token: a millisecond for the draft is less than half a step."""
    waits, wait_for_chains = [], RoundCoalescer.wait_for_chains

    def noted(coalescer, due_ns, num_ready, now_ns):
        waits.append(wait_for_chains(coalescer, due_ns, num_ready, now_ns) - now_ns)
        return waits[-1] + now_ns

    monkeypatch.setattr(RoundCoalescer, "wait_for_chains", noted)
    prompt = make_prompt(7)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=range(0, NUM_TOKENS, 5), pause=lambda: 0.0005)
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await drafted(client, address, text)
        assert max(waits) > 0
        await until_clean(core)


async def test_steps_follow_at_once_while_nothing_has_come(start_core, serve, plain, tmp_path, monkeypatch):
    """As in plain decoding: the next step begins before the event loop has seen the last one."""
    followed, continue_step = [], Session.continue_step

    def noted(session, *args):
        followed.append(session.chain is not None and session.due_ns > 0)
        continue_step(session, *args)

    monkeypatch.setattr(Session, "continue_step", noted)
    prompt = make_prompt(7)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=range(0, NUM_TOKENS, 5), pause=lambda: 0.02)
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await drafted(client, address, text)
        assert sum(followed) > 10
        await until_clean(core)


async def test_a_draft_that_comes_near_is_waited_for_again(start_core, serve, plain, tmp_path, monkeypatch):
    prompt = make_prompt(8)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=range(0, 60, 7))
    add_trip = TripTimes.add_trip

    def near_after_three(times, trip_ns):
        add_trip(times, trip_ns)
        times.num_trips = getattr(times, "num_trips", 0) + 1
        times.is_far &= times.num_trips < 4

    monkeypatch.setattr(TripTimes, "add_trip", near_after_three)
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await drafted(client, address, text)
        ways = [ahead > 0 for k, ahead in draft.asked if k]
        assert (ways[0], ways[-1]) == (False, False)
        assert any(ways)
        await until_clean(core)


def know_drafts(monkeypatch):
    """Every draft has streamed before."""
    monkeypatch.setattr("target_service.trip_times.TripTimes.add_trip", lambda times, _: None)
    init = TripTimes.__init__

    def known(times, **_):
        init(times)
        times.is_far, times.stream_tokens = True, K

    monkeypatch.setattr(TripTimes, "__init__", known)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("comes", ["at once", "late", "never"])
async def test_a_stream_of_a_draft_that_the_opening_names(  # noqa: PLR0917 (fixtures and parameters)
    start_core, serve, plain, tmp_path, monkeypatch, is_known, comes
):
    """The gateway says nothing more."""
    if is_known:
        know_drafts(monkeypatch)
    prompt = make_prompt(13)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=(40, 60))
    if comes == "late":
        draft.may_open.clear()
    async with start_core() as core, serving_draft(draft, tmp_path) as listening:
        address = listening + "/nobody" * (comes == "never")
        asked = opening_of(make_spec(prompt), address, num_draft_tokens=K)
        async with session(serve, core, tmp_path, prompt, draft=asked, max_tokens=NUM_TOKENS) as client:
            verdicts = await client.rest(lambda _: draft.may_open.set())
            assert tokens_of(client.first, verdicts) == text
        assert (sum(verdict.num_accepted for verdict in verdicts) > 5) == (comes != "never")
        await until_clean(core)


@pytest.mark.parametrize("wants", [True, False])
async def test_a_known_draft_is_asked_with_its_opening(  # noqa: PLR0917 (fixtures and parameters)
    start_core, serve, plain, tmp_path, monkeypatch, wants
):
    """It streams before anybody knows that it is open; what it sent until then is verified, or dropped."""
    know_drafts(monkeypatch)
    prompt = make_prompt(12)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=(40, 60))
    draft.may_open.clear()
    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await client.open_draft(address)
            client.decode(NUM_TOKENS)
            await until(lambda: len(draft.asked) > 3)
            draft.may_open.set()
            verdicts = await client.rest(lambda _: wants and client.draft(K))
            assert tokens_of(client.first, verdicts) == text
        assert {ahead > 0 for _, ahead in draft.asked[:3]} == {True}
        if wants:
            assert sum(verdict.num_accepted for verdict in verdicts) > 5
        else:
            assert draft.asked[-1] == (0, 0)
            assert not any(verdict.drafted for verdict in verdicts)
        await until_clean(core)


@pytest.mark.parametrize("fault", ["lost", "too much", "too large a token"])
async def test_what_a_draft_does_wrong_costs_the_draft_alone(start_core, serve, plain, tmp_path, fault):
    prompt = make_prompt(9)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, [*text, *[0] * 4000])

    def act(verdict):
        if len(prompt) + 20 < verdict.base_len < len(prompt) + 40:
            if fault == "lost":
                for task in draft.tasks:
                    task.cancel()
            elif fault == "too much":
                draft.is_greedy = True
            else:
                draft.text = [VOCAB] * 4000

    async with start_core() as core, serving_draft(draft, tmp_path) as address:
        async with session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            await drafted(client, address, text, act)
        if fault != "too much":  # the text may be over first
            lost = [answer.draft_lost for answer in client.told]
            assert [each.code for each in lost] == ["CANCELLED" if fault == "lost" else "INVALID_ARGUMENT"]
        await until(lambda: draft.ended == 1)
        await until_clean(core)


async def test_a_draft_over_tcp(start_core, serve, plain, tmp_path):
    prompt = make_prompt(10)
    text = plain(prompt, NUM_TOKENS)
    draft = StreamingDraft(prompt, text, wrong=(30, 50))
    server = RpcServer(ServerSettings(port=0))
    server.add(draft_grpc.add_DraftServiceServicer_to_server, draft, "specdec.v1.DraftService")
    await server.start()
    await server.set_serving(True)
    try:
        async with start_core() as core, session(serve, core, tmp_path, prompt, max_tokens=NUM_TOKENS) as client:
            assert client.opened.asks_remote_drafts
            verdicts = await drafted(client, server.address, text)
            assert sum(verdict.num_accepted for verdict in verdicts) > 5
        await until(lambda: draft.ended == 1)
    finally:
        await server.stop()
