"""One stream with many sessions: what goes wrong with one of them is told, and the others stay."""

import asyncio

import pytest

from draft_service import engine_stream
from draft_service.engine_stream import EngineStream
from specdec.errors import Overloaded
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.gateway.fake_draft import FakeDraft

PROMPT = [5, 6, 7]


def opening(name, **changes):
    given = {"token_ids": PROMPT, "prompt_len": 3, "max_tokens": 50, "num_speculative_tokens": 4}
    sampling = types_pb2.SamplingParams(temperature=0.0)
    return pb.OpenDraftSession(**(given | {"session_id": name, "sampling": sampling} | changes))


def advance(name, base_len=3, token_ids=(), num_draft_tokens=4):
    message = pb.Advance(base_len=base_len, token_ids=token_ids, num_draft_tokens=num_draft_tokens)
    return pb.SessionAdvance(session_id=name, advance=message)


@pytest.fixture
async def draft():
    draft = FakeDraft(quality=1.0)
    yield draft
    assert not draft.open_sessions
    assert draft.num_opened == draft.num_closed


@pytest.fixture
async def stream(draft):
    stream = EngineStream(draft)
    yield stream
    await stream.close()


async def step(stream, **changes):
    """The proposals by session, and the causes of losses."""
    answer = await stream.step(pb.DraftStepRequest(step=7, timeout_ms=2000, **changes))
    assert answer.step == 7
    proposals = {each.session_id: list(each.proposal.token_ids) for each in answer.proposals}
    return proposals, {each.session_id: each.cause for each in answer.lost}


async def open_all(stream, draft, *names):
    """Open sessions, and let them be prefilled."""
    proposals, _ = await step(stream, open=[opening(name) for name in names])
    assert not proposals
    await opened(draft, *names)


async def opened(draft, *names):
    async with asyncio.timeout(20):
        while not {session.spec.session_id for session in draft.open_sessions} >= {*names}:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_what_is_wrong_with_one_session_is_told(stream, draft, monkeypatch):
    monkeypatch.setattr(engine_stream, "MAX_SESSIONS", 2)
    await open_all(stream, draft, "a", "b")
    openings, names = [opening("bad", prompt_len=0), opening("c")], ["a", "b", "bad", "none"]
    proposals, lost = await step(stream, open=openings, advances=[advance(name) for name in names])
    assert {name: len(drafted) for name, drafted in proposals.items()} == {"a": 4, "b": 4}
    assert lost.keys() == {"bad", "c", "none"}
    assert "prompt_len" in lost["bad"]  # not that it is not open
    assert "2 sessions are open" in lost["c"]
    proposals, lost = await step(stream, advances=[advance("a", 9, [1]), advance("b", 3, proposals["b"][:2])])
    assert proposals.keys() == {"b"}
    assert "begins at 9; 3 tokens are known" in lost["a"]
    await open_all(stream, draft, "c")
    proposals, lost = await step(stream, close=["b"], advances=[advance("b", 5), advance("c")])
    assert (proposals.keys(), lost.keys()) == ({"c"}, {"b"})


async def test_a_name_in_use_is_refused(stream, draft):
    await open_all(stream, draft, "a")
    again = opening("a", token_ids=[8, 9], prompt_len=2)
    proposals, lost = await step(stream, open=[again], advances=[advance("a", 3, [11])])
    assert "choose another name" in lost["a"]
    assert len(proposals["a"]) == 4
    assert draft.num_opened == 1


@pytest.mark.usefixtures("virtual_time")
async def test_a_session_that_opens_holds_up_nobody(stream, draft):
    await open_all(stream, draft, "a")
    draft.open_latency_s = 1.0
    for base_len in (3, 4):
        start = asyncio.get_running_loop().time()
        changes = {"open": [opening("slow")]} if base_len == 3 else {}
        proposals, lost = await step(stream, **changes, advances=[advance("a", base_len, [11]), advance("slow")])
        assert (len(proposals["a"]), lost) == (4, {})
        assert asyncio.get_running_loop().time() == start


@pytest.mark.usefixtures("virtual_time")
async def test_a_step_that_was_superseded_waits_for_nothing(stream, draft):
    await open_all(stream, draft, "a")
    draft.latency_s = 0.3
    superseded = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.05, superseded.set_result, None)
    start = asyncio.get_running_loop().time()
    request = pb.DraftStepRequest(advances=[advance("a", 3, [11])], timeout_ms=2000)
    assert not (await stream.step(request, superseded)).proposals
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.05)
    proposals, _ = await step(stream, advances=[advance("a", 4, [12])])
    assert len(proposals["a"]) == 4


@pytest.mark.usefixtures("virtual_time")
async def test_sessions_that_idle_end(stream, draft, monkeypatch):
    monkeypatch.setattr(engine_stream, "MAX_IDLE_S", 0.2)
    await open_all(stream, draft, "a", "b")
    async with asyncio.timeout(20):
        base_len = 3
        while len(draft.open_sessions) == 2:
            assert (await step(stream, advances=[advance("a", base_len, [11])]))[1] == {}
            base_len += 1
            await asyncio.sleep(0.02)
    _, lost = await step(stream, advances=[advance("a", base_len, [11]), advance("b")])
    assert lost == {"b": "no session of this name is open"}


@pytest.mark.usefixtures("virtual_time")
async def test_a_session_that_could_not_be_opened_is_forgotten_as_well(stream, draft, monkeypatch):
    monkeypatch.setattr(engine_stream, "MAX_IDLE_S", 0.05)
    monkeypatch.setattr(engine_stream, "MAX_SESSIONS", 1)
    draft.faults.plan["open"] = {0: Overloaded("no memory")}
    await step(stream, open=[opening("a")])
    async with asyncio.timeout(20):
        while (await step(stream, open=[opening("b")]))[1]:  # noqa: ASYNC110 (no event tells of an end)
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("virtual_time")
async def test_an_answer_does_not_wait_longer_than_its_time(stream, draft):
    await open_all(stream, draft, "a")
    draft.latency_s = 0.5
    start = asyncio.get_running_loop().time()
    request = pb.DraftStepRequest(advances=[advance("a", 3, [11])], timeout_ms=30)
    assert not (await stream.step(request)).proposals
    assert asyncio.get_running_loop().time() - start == pytest.approx(0.03)


async def test_tokens_that_are_committed_while_a_session_opens_reach_it_together(stream, draft):
    draft.open_latency_s = 0.05
    await step(stream, open=[opening("a")], advances=[advance("a")])
    for base_len in (3, 4):
        assert await step(stream, advances=[advance("a", base_len, [11 + base_len])]) == ({}, {})
    await opened(draft, "a")
    proposals, lost = await step(stream, advances=[advance("a", 5, [20])])
    assert (len(proposals["a"]), lost) == (4, {})
    assert [session.token_ids for session in draft.sessions] == [[*PROMPT, 14, 15, 20]]


async def test_a_failure_that_is_nobodys_fault_is_logged(stream, draft, caplog):
    await open_all(stream, draft, "a", "b")
    draft.faults.plan["propose"] = {0: ZeroDivisionError("a bug")}
    _, lost = await step(stream, advances=[advance("a"), advance("b")])
    assert len(lost) == 1
    assert "a bug" in caplog.text
