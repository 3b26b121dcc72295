"""A target that is lost, full or wrong: the text continues on another one, or the error says why it cannot."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from gateway.decoding.loop import Decoding
from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded, StaleSession, Unavailable
from tests.draft_first import draft_first
from tests.gateway.decoding.decodings import PROMPT, assert_all_closed, context_of, request_of, run
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import FakeTarget, Faults, logprobs_of, params, reference
from tests.pairwise import parametrize_pairwise

pytestmark = pytest.mark.usefixtures("short_pauses")


@parametrize_pairwise(
    {
        "event": ["open", "verify", "multi_step"],
        "error": [Unavailable("gone"), StaleSession("old")],
        "with_draft": [True, False],
    }
)
async def test_target_lost_at_every_round(event, error, with_draft):
    expected = reference(PROMPT, params())
    for index in range(42 if event == "multi_step" else 12):
        faults = Faults(**{event: {index: error}})
        target, spare, draft = FakeTarget(faults=faults, latency_s=0.0001), FakeTarget(), FakeDraft(quality=0.6)
        drafts = [draft] if with_draft else []
        context = context_of([target, spare], drafts)
        out, run_ = await run(context, request_of(4))
        assert out == expected
        assert_all_closed(target, spare, draft)
        assert run_.metrics.num_target_failures == (faults.counts.get(event, 0) > index)


async def test_reopening_raises_the_epoch_and_sends_what_was_accepted():
    target = FakeTarget(faults=Faults(verify={1: Unavailable("gone")}))
    out, run_ = await run(context_of([target], [FakeDraft(quality=1.0)]), request_of(4, prompt_logprobs=1))
    assert out == reference(PROMPT, params())
    first, second = target.specs
    assert (first.epoch, second.epoch) == (1, 2)
    assert second.prompt_len == 3
    assert second.token_ids == (*PROMPT, *out[: second.num_output_tokens])
    assert second.params.prompt_logprobs is None
    assert len(run_.opened.prompt_logprobs) == 2


async def test_target_lost_too_often_is_unavailable():
    target, draft = FakeTarget(faults=Faults(verify=lambda i: Unavailable("gone"))), FakeDraft()
    with pytest.raises(Unavailable, match="lost 3 times"):
        await run(context_of([target], [draft], max_target_retries=2), request_of(4))
    assert target.num_opened == 3
    assert_all_closed(target, draft)


async def lose_and_return(context, request, *, at=20, after_s):
    """Run a request whose only target is lost once ``at`` tokens are there, and is back after so many seconds."""
    router, loop, out = context.router, asyncio.get_running_loop(), []
    (replica,) = router.targets.replicas
    target = replica.backend

    def come_back():
        target.dead = False
        router.target_up(replica, target.model)

    run_ = Decoding(context, request)
    async with contextlib.aclosing(run_.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
            if len(out) >= at and target.num_opened == 1 and not target.dead:
                target.dead = True
                router.down(replica, "it was killed")
                loop.call_later(after_s, come_back)
    return out, run_


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(("temperature", "k"), [(0.0, 4), (1.0, 4), (1.0, 0)])
async def test_a_request_waits_for_its_only_target_to_return(temperature, k):
    target, draft = FakeTarget(latency_s=0.001), FakeDraft(quality=0.7)
    request = request_of(k, temperature=temperature, max_tokens=80)
    started = asyncio.get_running_loop().time()
    out, run_ = await lose_and_return(context_of([target], [draft]), request, after_s=19)
    assert out == reference(PROMPT, request.params)
    assert run_.metrics.num_target_failures == 1
    assert 19 < asyncio.get_running_loop().time() - started < 20
    assert_all_closed(target, draft)


class Altered(asyncio.Queue):
    """Verdicts with other fields than the target gave them."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def put_nowait(self, verdict):
        super().put_nowait(replace(verdict, **self.change))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (2**32 - 1,)},
        {"token_ids": (3,) * 100},
        {"num_accepted": 2**31, "num_draft_tokens": 2**31},
        {"num_accepted": 5},
        {"logprobs": logprobs_of(3, 1) * 7},
        {"num_multi_step_left": 1000},
    ],
    ids=", ".join,
)
async def test_a_verdict_that_cannot_be_is_a_lost_target(change):
    target, spare, drafts = FakeTarget(), FakeTarget(), [FakeDraft(quality=0.6)]
    context = context_of([target, spare], drafts)
    out, run_ = [], Decoding(context, request_of(4))
    async with contextlib.aclosing(run_.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
            for session in [*target.open_sessions, *spare.open_sessions] if len(out) < 9 else ():
                if session.spec.epoch == 1:
                    session.received = Altered(change)
    assert out == reference(PROMPT, params())
    assert run_.metrics.num_target_failures == 1
    assert_all_closed(target, spare, *drafts)


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("wait_s", "in_s", "error", "message"),
    [
        (5.0, None, Unavailable, r"^the target was lost and none came back within 5 s; try again later$"),
        (5.0, 2.0, DeadlineExceeded, r"^the request's deadline passed after \d+ tokens; give it more time"),
    ],
)
async def test_a_request_waits_no_longer_than_it_may(wait_s, in_s, error, message):
    target, loop = FakeTarget(latency_s=0.001), asyncio.get_running_loop()
    started = loop.time()
    request = request_of(0, max_tokens=80, deadline=None if in_s is None else started + in_s)
    with pytest.raises(error, match=message):
        await lose_and_return(context_of([target], target_wait_s=wait_s), request, after_s=19)
    assert (in_s or wait_s) <= loop.time() - started < (in_s or wait_s) + 0.2
    assert_all_closed(target)


async def test_full_targets():
    full = [FakeTarget(faults=Faults(open=lambda i: Overloaded("full", retry_after_s=7))) for _ in range(2)]
    with pytest.raises(Overloaded, match="full"):
        await run(context_of(full), request_of(0))
    assert sum(target.faults.counts["open"] for target in full) == 2
    roomy = FakeTarget()
    out, _ = await run(context_of([full[0], roomy]), request_of(0))
    assert out == reference(PROMPT, params())


async def test_no_target_fails_at_once():
    context = context_of([FakeTarget()], [FakeDraft()])
    context.router.targets.replicas[0].healthy = False
    with pytest.raises(Unavailable, match="none of the 1 target"):
        await run(context, request_of(4))


async def test_the_requests_own_fault_is_not_retried():
    target, draft = FakeTarget(faults=Faults(open={0: InvalidRequest("too long")})), FakeDraft(open_latency_s=0.01)
    with pytest.raises(InvalidRequest):
        await run(context_of([target], [draft]), request_of(4))
    assert_all_closed(target, draft)


@pytest.mark.parametrize("param", ["structured_outputs", "allowed_token_ids"])
async def test_a_request_that_cannot_be_continued_fails_at_once(param):
    """The refusal names what the request asks for, so no proposal is to blame."""
    faults = Faults(verify={1: InvalidRequest("every token is forbidden", param=param)})
    target, draft = FakeTarget(faults=faults, latency_s=0.0001), FakeDraft()
    draft_first(target, draft)
    with pytest.raises(InvalidRequest, match="every token is forbidden"):
        await run(context_of([target], [draft]), request_of(4))
    assert target.num_opened == 1
    assert_all_closed(target, draft)
