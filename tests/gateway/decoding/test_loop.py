"""The decoding loop: its text is the target's whatever the draft does, and no session stays open."""

import asyncio
import contextlib

import pytest

from gateway.decoding.context import DecodingContext
from gateway.decoding.loop import Decoding
from gateway.decoding.request import DecodingRequest
from gateway.pacing.pace import FixedPace
from gateway.pacing.target_pacer import TargetPacer
from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded, StaleSession, Unavailable
from specdec.rules import Rule
from specdec.types import FinishReason
from tests.gateway.decoding.decodings import PROMPT, assert_all_closed, context_of, kill_used, request_of, run, run_with
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import EOS, FakeTarget, Faults, params, reference, share
from tests.pairwise import parametrize_pairwise

pytestmark = pytest.mark.usefixtures("short_pauses")


@parametrize_pairwise({"k": [0, 1, 3, 8], "quality": [0.0, 0.5, 1.0], "temperature": [0.0, 1.0]})
async def test_text_does_not_depend_on_the_draft(k, quality, temperature):
    target, draft = FakeTarget(latency_s=0.0001), FakeDraft(quality=quality)
    context = context_of([target], [draft])
    request = request_of(k, temperature=temperature)
    out, run_ = await run(context, request)
    assert out == reference(PROMPT, request.params)
    assert_all_closed(target, draft)
    assert context.open_sessions == 0
    metrics = run_.metrics
    assert sum(metrics.acceptance_histogram) == metrics.num_spec_steps
    if k and quality == 1.0:
        assert metrics.draft_acceptance_rate == 1.0
        assert metrics.mean_acceptance_length > min(k, 3)
    if k == 0:
        assert draft.num_opened == 0
        assert target.faults.counts == {"open": 1, "multi_step": 39}


async def test_no_draft_decodes_ahead_in_one_call():
    target = FakeTarget()
    out, _ = await run(context_of([target]), request_of(4))
    assert out == reference(PROMPT, params())
    assert_all_closed(target)


@pytest.mark.usefixtures("virtual_time")
async def test_both_sessions_open_at_the_same_time():
    target = FakeTarget(latency_s=0.001, open_latency_s=0.05)
    draft = FakeDraft(open_latency_s=0.05, quality=1.0)
    loop = asyncio.get_running_loop()
    start = loop.time()
    out, run_ = await run(context_of([target], [draft]), request_of(4, max_tokens=8))
    assert loop.time() - start < 0.09
    assert len(out) == 8
    assert run_.metrics.num_draft_tokens >= 4


@parametrize_pairwise(
    {
        "error": [Unavailable("gone"), Overloaded("full"), StaleSession("old"), RuntimeError("bug")],
        "event": ["open", "propose"],
        "temperature": [0.0, 1.0],
    }
)
async def test_draft_lost_at_every_round(event, error, temperature):
    expected = reference(PROMPT, params(temperature=temperature))
    for index in range(12):
        faults = Faults(**{event: {index: error}})
        target, draft = FakeTarget(latency_s=0.0002), FakeDraft(faults=faults, quality=0.7)
        out, run_ = await run(context_of([target], [draft]), request_of(4, temperature=temperature))
        assert out == expected
        assert_all_closed(target, draft)
        if event == "propose" and faults.counts[event] > index:
            assert run_.metrics.num_draft_failures == 1


@pytest.mark.usefixtures("virtual_time")
async def test_slow_draft_is_left_behind_and_comes_back():
    target, draft = FakeTarget(latency_s=0.002), FakeDraft(quality=1.0)
    context = context_of([target], [draft], draft_timeout_s=0.02)
    request = request_of(4, max_tokens=120)
    out, run_ = [], Decoding(context, request)
    async with contextlib.aclosing(run_.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
            if len(out) == 26:
                draft.frozen.clear()
                asyncio.get_running_loop().call_later(0.06, draft.frozen.set)
    assert out == reference(PROMPT, request.params)
    assert run_.metrics.num_draft_failures == 1
    assert draft.num_opened == 2
    assert draft.specs[1].num_output_tokens > 26
    assert target.faults.counts["multi_step"] > 1
    assert run_.metrics.num_draft_tokens > 50
    assert_all_closed(target, draft)


async def test_draft_that_refuses_the_request_is_not_asked_again():
    draft = FakeDraft(faults=Faults(open=lambda i: InvalidRequest("longer than my context")))
    target = FakeTarget(latency_s=0.0001)
    out, run_ = await run(context_of([target], [draft]), request_of(4))
    assert out == reference(PROMPT, params())
    assert draft.faults.counts["open"] == 1
    assert run_.metrics.num_draft_failures == 1


async def test_an_unexpected_error_of_the_opening_is_logged_once_and_ends_drafting(monkeypatch, caplog):
    """It is no failure of the draft but a fault of the gateway, and would come again with every round."""

    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.decoding.draft_client.backoff_s", broken)
    target, draft = FakeTarget(latency_s=0.0002), FakeDraft(faults=Faults(open={0: Unavailable("gone")}))
    out, run_ = await run(context_of([target], [draft]), request_of(4))
    assert out == reference(PROMPT, params())
    assert draft.faults.counts["open"] == 1
    assert run_.metrics.num_draft_failures == 2
    logged = [record for record in caplog.records if record.exc_info and record.exc_info[0] is ZeroDivisionError]
    assert len(logged) == 1
    assert_all_closed(target, draft)


@pytest.mark.usefixtures("virtual_time")
async def test_a_draft_is_opened_again_after_a_thousand_failures(monkeypatch):
    monkeypatch.setattr("gateway.decoding.draft_client.LAST_BACKOFF_S", 0.001)
    num_failures = 1100  # 2.0**1024 is no float any more
    faults = Faults(open=lambda index: RuntimeError("bug") if index < num_failures else None)
    target, draft = FakeTarget(latency_s=0.05), FakeDraft(faults=faults, quality=1.0)
    request = request_of(4, max_tokens=120)
    out, run_ = await run(context_of([target], [draft]), request)
    assert out == reference(PROMPT, request.params)
    assert run_.metrics.num_draft_failures == num_failures
    assert run_.metrics.num_draft_tokens > 0
    assert_all_closed(target, draft)


async def test_draft_moves_to_another_replica():
    drafts = [FakeDraft(quality=1.0), FakeDraft(quality=1.0)]
    target = FakeTarget(latency_s=0.0005)
    context = context_of([target], drafts)
    run_ = Decoding(context, request_of(2, max_tokens=80))
    out = await run_with(run_, 30, lambda: kill_used(drafts))
    assert out == reference(PROMPT, run_.request.params)
    assert [draft.num_opened for draft in drafts] == [1, 1]
    assert_all_closed(target, *drafts)


async def test_empty_proposals_are_plain_steps():
    target, draft = FakeTarget(), FakeDraft(quality=1.0, empty_every=2)
    out, _ = await run(context_of([target], [draft]), request_of(4))
    assert out == reference(PROMPT, params())


async def test_draft_without_proposals_switches_itself_off():
    target, draft = FakeTarget(latency_s=0.001), FakeDraft(limit=0)
    out, run_ = await run(context_of([target], [draft]), request_of(4))
    assert out == reference(PROMPT, params())
    assert run_.metrics.num_draft_tokens == 0
    assert draft.faults.counts == {"open": 1}
    assert_all_closed(target, draft)


async def test_crowd_stops_drafting_until_it_is_gone():
    target, draft = FakeTarget(latency_s=0.001), FakeDraft(quality=1.0)
    context = context_of([target], [draft], disable_by_batch_size=2)
    request = request_of(4, max_tokens=100)
    first = Decoding(context, request)
    out = []
    async with contextlib.aclosing(first.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
            if len(out) == 21:
                others = [asyncio.create_task(run(context, request_of(4, max_tokens=20))) for _ in range(3)]
    assert out == reference(PROMPT, request.params)
    assert target.faults.counts["multi_step"] > 20
    assert first.metrics.num_draft_tokens > 40
    for other in others:
        assert (await other)[0] == out[:20]
    assert_all_closed(target, draft)


class ScriptedPace(FixedPace):
    """Changes its mind all the time, as a function of how much is left and of how often it was asked."""

    def __init__(self, limit, seed):
        super().__init__(limit)
        self.seed, self.calls, self.left = seed, 0, 0
        self.asked = []

    def num_draft_tokens(self, num_remaining, now_ns):
        self.calls += 1
        wanted = int(share(self.seed, self.calls, num_remaining) * 8) - 2
        self.k = max(0, min(wanted, self._limit, num_remaining - 1))
        return self.k

    @property
    def is_settled(self):
        return False

    def record(self, verdict, num_asked, now_ns, *, tree_depth=None, is_stream=False):
        assert num_asked >= verdict.num_draft_tokens
        self.asked.append(num_asked)

    def record_plain(self, num_verdicts, num_tokens, timings, now_ns):
        self.asked.append(0)

    def leave(self):
        self.left += 1


@parametrize_pairwise({"seed": range(12), "temperature": [0.0, 1.0]})
async def test_text_does_not_depend_on_the_pace(seed, temperature):
    target, draft = FakeTarget(latency_s=0.0001 * (seed % 3)), FakeDraft(quality=0.7, latency_s=0.0001 * (seed % 2))
    context = context_of([target], [draft])
    paces = []
    context.pace = lambda _, limit, drafter: paces.append(ScriptedPace(limit, seed)) or paces[-1]
    request = request_of(5, temperature=temperature, max_tokens=150)
    out, _ = await run(context, request)
    assert out == reference(PROMPT, request.params)
    assert_all_closed(target, draft)
    (pace,) = paces
    assert pace.left == 1
    assert {num == 0 for num in pace.asked} == {True, False}
    assert target.faults.counts["verify"] > 1
    assert target.faults.counts["multi_step"] > 1


async def test_targets_are_told_which_sessions_are_paced_together():
    """Those of one gateway that may draft; others have no group."""
    target, draft = FakeTarget(), FakeDraft()
    here, elsewhere = (context_of([target], [draft], fixed_draft_length=False) for _ in range(2))
    for context, k in ((here, 4), (here, 2), (elsewhere, 4), (here, 0)):
        await run(context, request_of(k))
    first, second, other, plain = (spec.pacing_group for spec in target.specs)
    assert first == second != other
    assert (bool(first), bool(other), plain) == (True, True, "")


async def test_plain_verdicts_that_change_nothing_are_told_together():
    """And the draft is asked at the first verdict after pacing has learned something."""

    class Settled(FixedPace):
        """Plain until so many verdicts were told, then drafting, then plain again."""

        told, num_rounds, unsettled = [], 0, False

        @property
        def is_settled(self):
            return not self.k and not self.unsettled

        def num_draft_tokens(self, num_remaining, now_ns):
            is_due = self.unsettled and self.num_rounds < 3
            self.k = max(0, min(self._limit, num_remaining - 1)) if is_due else 0
            return self.k

        def record(self, verdict, num_asked, now_ns, *, tree_depth=None, is_stream=False):
            self.num_rounds += 1

        def record_plain(self, num_verdicts, num_tokens, timings, now_ns):
            self.told.append((num_verdicts, num_tokens))
            self.unsettled = sum(tokens for _, tokens in self.told) >= 20 and self.num_rounds < 3

    target, draft = FakeTarget(latency_s=0.0001), FakeDraft(quality=1.0)
    context = context_of([target], [draft])
    pace = Settled(4)
    context.pace = lambda *_: pace
    out, decoding = await run(context, request_of(4, max_tokens=100))
    assert out == reference(PROMPT, params(max_tokens=100))
    assert pace.num_rounds >= 3
    assert pace.told[0] == (1, 1)
    assert (8, 8) in pace.told
    assert all(verdicts == tokens <= 8 for verdicts, tokens in pace.told)
    assert sum(tokens for _, tokens in pace.told) + decoding.metrics.num_accepted_draft_tokens + pace.num_rounds == 100
    assert_all_closed(target, draft)


async def test_a_session_moved_to_another_target_is_paced_there():
    faults = Faults(verify={3: Unavailable("gone")}, multi_step={3: Unavailable("gone")})
    target, draft = FakeTarget(faults=faults), FakeDraft(quality=0.7)
    context = context_of([target], [draft])
    paces = []
    context.pace = lambda _, limit, drafter: paces.append(ScriptedPace(limit, 5)) or paces[-1]
    out, _ = await run(context, request_of(5, max_tokens=100))
    assert out == reference(PROMPT, params(max_tokens=100))
    assert len(paces) == 3
    assert [pace.left for pace in paces] == [1, 1, 1]
    assert_all_closed(target, draft)


async def test_no_draft_session_is_opened_while_none_is_wanted():
    class Off(FixedPace):
        def num_draft_tokens(self, num_remaining, now_ns):
            return 0

    target, draft = FakeTarget(latency_s=0.0001), FakeDraft(quality=1.0)
    context = context_of([target], [draft])
    context.pace = lambda _, limit, drafter: Off(limit)
    out, run_ = await run(context, request_of(4, max_tokens=60))
    assert out == reference(PROMPT, params(max_tokens=60))
    assert draft.num_opened == 0
    assert target.faults.counts == {"open": 1, "multi_step": 59}
    assert run_.metrics.num_draft_tokens == 0


async def test_adaptive_sessions_leave_their_target():
    pacers = []

    def make_pacer(lookups):
        pacers.append(TargetPacer(lookups))
        return pacers[0]

    target, draft = FakeTarget(latency_s=0.0002), FakeDraft(quality=0.9)
    router = context_of([target], [draft]).router
    context = DecodingContext(router, make_pacer=make_pacer)
    request = request_of(4, max_tokens=60)
    outs = await asyncio.gather(*(run(context, request) for _ in range(6)))
    assert all(out == reference(PROMPT, request.params) for out, _ in outs)
    (pacer,) = pacers
    assert pacer.num_sessions == 0
    assert_all_closed(target, draft)


async def test_stop_tokens_end_the_loop():
    expected = reference(PROMPT, params(stop_token_ids=()))
    stop = params(stop_token_ids=(expected[9],))
    context = context_of([FakeTarget()], [FakeDraft(quality=1.0)])
    run_ = Decoding(context, DecodingRequest(prompt=PROMPT, params=stop, num_speculative_tokens=4))
    out = []
    async with contextlib.aclosing(run_.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
    assert out == reference(PROMPT, stop)
    assert verdict.finish_reason is FinishReason.STOP
    assert verdict.stop_token_id == out[-1]
    assert EOS not in out


@pytest.mark.usefixtures("virtual_time")
async def test_deadline():
    target, draft = FakeTarget(latency_s=0.01), FakeDraft()
    context = context_of([target], [draft])
    with pytest.raises(DeadlineExceeded, match=r"after [1-9][0-9]? tokens"):
        await run(context, request_of(1, max_tokens=200, deadline=asyncio.get_running_loop().time() + 0.1))
    assert_all_closed(target, draft)


@pytest.mark.parametrize("phase", ["open", "verify", "multi_step", "propose", "draft_open"])
@pytest.mark.parametrize("twice", [False, True])
async def test_cancellation_in_every_phase(phase, twice):
    target = FakeTarget(latency_s=0.001, open_latency_s=0.01 if phase == "open" else 0)
    draft = FakeDraft(open_latency_s=0.05 if phase in ("draft_open", "multi_step") else 0, quality=0.5)
    if phase == "verify":
        target.latency_s = 0.02
    if phase == "propose":
        draft.latency_s = 0.02
    context = context_of([target], [draft])
    for delay in (0, 0.001, 0.005, 0.013, 0.021, 0.03):
        task = asyncio.create_task(run(context, request_of(4, max_tokens=400)))
        await asyncio.sleep(delay)
        task.cancel()
        if twice:
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*context.closings)
        assert_all_closed(target, draft)
        assert context.open_sessions == 0


async def test_a_consumer_that_stops_early_closes_everything():
    target, draft = FakeTarget(), FakeDraft()
    context = context_of([target], [draft])
    for stop_after in range(8):
        async with contextlib.aclosing(Decoding(context, request_of(4)).verdicts()) as verdicts:
            for _ in range(stop_after):
                await anext(verdicts)
        assert_all_closed(target, draft)


async def test_pinned_sessions_keep_their_name_and_rule():
    target, draft = FakeTarget(faults=Faults(verify={1: StaleSession("old")})), FakeDraft()
    request = DecodingRequest(
        prompt=PROMPT, params=params(), num_speculative_tokens=4, session_id="chat-1", rule=Rule.COUPLED
    )
    await run(context_of([target], [draft]), request)
    assert {spec.session_id for spec in (*target.specs, *draft.specs)} == {"chat-1"}
    assert all(spec.is_named and spec.rule is Rule.COUPLED for spec in (*target.specs, *draft.specs))
