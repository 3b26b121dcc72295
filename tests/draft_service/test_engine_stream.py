"""One stream with many sessions: what goes wrong with one of them is told, and the others stay."""

import asyncio

import pytest

from draft_service import engine_stream
from draft_service.engine_stream import EngineStream
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import types_pb2
from tests.gateway.fakes import FakeDraft

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


async def test_what_is_wrong_with_one_session_is_told(stream, monkeypatch):
    monkeypatch.setattr(engine_stream, "MAX_SESSIONS", 2)
    openings = [opening("a"), opening("bad", prompt_len=0), opening("b"), opening("c")]
    proposals, lost = await step(stream, open=openings, advances=[advance("a"), advance("b"), advance("none")])
    assert {name: len(drafted) for name, drafted in proposals.items()} == {"a": 4, "b": 4}
    assert lost.keys() == {"bad", "c", "none"}
    assert "prompt_len" in lost["bad"]
    assert "2 sessions are open" in lost["c"]
    proposals, lost = await step(stream, advances=[advance("a", 9, [1]), advance("b", 3, proposals["b"][:2])])
    assert proposals.keys() == {"b"}
    assert "begins at 9; 3 tokens are known" in lost["a"]
    proposals, lost = await step(stream, close=["b"], open=[opening("c")], advances=[advance("b", 5), advance("c")])
    assert (proposals.keys(), lost.keys()) == ({"c"}, {"b"})


async def test_a_name_in_use_is_refused(stream, draft):
    await step(stream, open=[opening("a")], advances=[advance("a")])
    again = opening("a", token_ids=[8, 9], prompt_len=2)
    proposals, lost = await step(stream, open=[again], advances=[advance("a", 3, [11])])
    assert "choose another name" in lost["a"]
    assert len(proposals["a"]) == 4
    assert draft.num_opened == 1


async def test_an_answer_does_not_wait_longer_than_its_time(draft):
    draft.open_latency_s = 0.3
    stream = EngineStream(draft)
    start = asyncio.get_running_loop().time()
    request = pb.DraftStepRequest(open=[opening("a")], advances=[advance("a")], timeout_ms=30)
    assert not (await stream.step(request)).proposals
    # Tokens that are committed while the session opens reach it together.
    for base_len in (3, 4):
        request = pb.DraftStepRequest(advances=[advance("a", base_len, [11 + base_len])], timeout_ms=30)
        assert not (await stream.step(request)).proposals
    assert asyncio.get_running_loop().time() - start < 0.25
    proposals, lost = await step(stream, advances=[advance("a", 5, [20])])
    assert (len(proposals["a"]), lost) == (4, {})
    assert [session.token_ids for session in draft.sessions] == [[*PROMPT, 14, 15, 20]]
    await stream.close()


async def test_a_failure_that_is_nobodys_fault_is_logged(stream, draft, caplog):
    draft.faults.plan["propose"] = {0: ZeroDivisionError("a bug")}
    _, lost = await step(stream, open=[opening("a"), opening("b")], advances=[advance("a"), advance("b")])
    assert len(lost) == 1
    assert "a bug" in caplog.text
