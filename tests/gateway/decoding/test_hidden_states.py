"""The gateway asks the target for what the draft reads, and passes every row on once, in order, within its limits."""

import asyncio

import pytest

from gateway.decoding.context import DecodingContext
from gateway.decoding.draft_client import DraftClient
from gateway.decoding.loop import Decoding
from gateway.placement.routing import HiddenStateSpec
from specdec import hidden_state_buffer as state_buffer
from specdec.errors import InvalidRequest, Unavailable
from tests.gateway.decoding.decodings import PROMPT, assert_all_closed, context_of, kill_used, request_of, run, run_with
from tests.gateway.fake_draft import FakeDraft, draft_info
from tests.gateway.fakes import FakeTarget, Faults, params, reference
from tests.until import until

pytestmark = pytest.mark.usefixtures("short_pauses")

LAYERS = (2, -1)


class LateDraft(FakeDraft):
    """Opens no session before it may."""

    def __init__(self, **options):
        super().__init__(**options)
        self.may_open = asyncio.Event()

    async def open(self, spec):
        await self.may_open.wait()
        return await super().open(spec)


def reader(kind=FakeDraft, **options):
    changes = {name: options.pop(name) for name in ("hidden_state_layers", "last_hidden_state_only") if name in options}
    return kind(info=draft_info(8, **{"hidden_state_layers": LAYERS, **changes}), **options)


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_row_comes_once_with_its_tokens(quality, temperature):
    target, draft = FakeTarget(latency_s=0.0001), reader(quality=quality)
    request = request_of(4, temperature=temperature)
    out, run_ = await run(context_of([target], [draft]), request)
    assert out == reference(PROMPT, request.params)
    assert target.specs[0].hidden_state_layers == LAYERS
    (session,) = draft.sessions
    assert session.known_states == set(range(len(session.token_ids) - 1))
    assert draft.num_unready == 0
    assert run_.metrics.num_draft_tokens > 0
    assert_all_closed(target, draft)


@pytest.mark.parametrize("holds", [True, False])
async def test_states_wait_for_a_draft_that_is_late(holds):
    target, draft = FakeTarget(latency_s=0.001, holds_states=holds), reader(LateDraft, quality=1.0)
    run_ = Decoding(context_of([target], [draft]), request_of(4, max_tokens=80))
    out = await run_with(run_, 20, draft.may_open.set)
    assert out == reference(PROMPT, run_.request.params)
    (session,) = draft.sessions
    assert session.known_states == set(range(len(session.token_ids) - 1))
    assert target.faults.counts["multi_step"] > 2
    assert draft.num_unready == 0


async def test_a_gateway_of_an_earlier_release_gets_all_states(monkeypatch):
    """It asks the draft at once, which has no states then, and again with the last token of multi-step decode."""
    request = DraftClient.request
    monkeypatch.setattr(DraftClient, "request", lambda self, k, **_: request(self, k))
    target, draft = FakeTarget(latency_s=0.001), reader(LateDraft, quality=1.0)
    run_ = Decoding(context_of([target], [draft]), request_of(4, max_tokens=80))
    out = await run_with(run_, 20, draft.may_open.set)
    assert out == reference(PROMPT, run_.request.params)
    (session,) = draft.sessions
    assert session.known_states == set(range(len(session.token_ids) - 1))
    assert draft.num_unready <= 2
    assert run_.metrics.num_accepted_draft_tokens > 20


async def test_after_a_plain_stretch_the_draft_gets_its_states_in_one_message():
    target, draft = FakeTarget(latency_s=0.001), reader(LateDraft, quality=1.0)
    run_ = Decoding(context_of([target], [draft]), request_of(4, max_tokens=80))
    await run_with(run_, 30, draft.may_open.set)
    (session,) = draft.sessions
    assert session.num_states_first >= 30 + len(PROMPT) - 1
    assert draft.num_unready == 0


@pytest.mark.parametrize("holds", [True, False])
async def test_only_the_newest_row_is_kept_where_that_is_enough(holds):
    target = FakeTarget(latency_s=0.001, holds_states=holds)
    draft = reader(LateDraft, quality=0.5, last_hidden_state_only=True)
    run_ = Decoding(context_of([target], [draft]), request_of(4, max_tokens=60))
    out = await run_with(run_, 10, draft.may_open.set)
    assert out == reference(PROMPT, run_.request.params)
    assert target.specs[0].last_hidden_state_only
    (session,) = draft.sessions
    assert session.new_states == [len(session.token_ids) - 2]
    assert len(session.known_states) < len(session.token_ids) / 2
    assert draft.num_unready == 0


@pytest.mark.parametrize(("k", "drafts"), [(4, [FakeDraft]), (0, [reader]), (4, [])])
async def test_nothing_is_asked_for_where_nobody_reads_it(k, drafts):
    target = FakeTarget()
    out, _ = await run(context_of([target], [make() for make in drafts]), request_of(k))
    assert out == reference(PROMPT, params())
    assert target.specs[0].hidden_state_layers == ()


@pytest.mark.parametrize("holds", [True, False])
async def test_a_draft_that_was_lost_gets_what_came_since(holds):
    drafts = [reader(quality=1.0), reader(quality=1.0)]
    target = FakeTarget(latency_s=0.0005, holds_states=holds)
    run_ = Decoding(context_of([target], drafts), request_of(2, max_tokens=80))
    out = await run_with(run_, 30, lambda: kill_used(drafts))
    assert out == reference(PROMPT, run_.request.params)
    assert [draft.num_opened for draft in drafts] == [1, 1]
    first, second = sorted((draft.sessions[0] for draft in drafts), key=lambda session: len(session.token_ids))
    assert first.known_states == set(range(len(first.token_ids) - 1))
    assert second.known_states == set(range(min(second.known_states), len(second.token_ids) - 1))
    assert 30 <= min(second.known_states) < 45
    assert_all_closed(target, *drafts)


async def test_a_target_that_was_lost_sends_the_prompts_states_again():
    targets = [FakeTarget(latency_s=0.0005), FakeTarget(latency_s=0.0005)]
    draft = reader(quality=0.8)
    run_ = Decoding(context_of(targets, [draft]), request_of(3, max_tokens=80))
    out = await run_with(run_, 30, lambda: kill_used(targets))
    assert out == reference(PROMPT, run_.request.params)
    assert run_.metrics.num_target_failures == 1
    assert all(target.specs[0].hidden_state_layers == LAYERS for target in targets)
    (session,) = draft.sessions
    assert session.known_states == set(range(len(session.token_ids) - 1))
    assert_all_closed(*targets, draft)


async def test_what_waits_is_bounded_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(state_buffer.StateBuffer.__init__, "__defaults__", (10 * 8,))
    target, draft = FakeTarget(latency_s=0.001), reader(LateDraft, quality=1.0)
    run_ = Decoding(context_of([target], [draft]), request_of(2, max_tokens=100))
    out = await run_with(run_, 30, draft.may_open.set)
    assert out == reference(PROMPT, run_.request.params)
    (session,) = draft.sessions
    first = min(session.known_states)
    assert first > len(PROMPT)
    assert session.known_states == set(range(first, len(session.token_ids) - 1))
    assert draft.num_unready == 0


async def test_a_target_without_those_layers_is_used_without_the_draft():
    refusal = InvalidRequest("no such layer", param="hidden_state_layers")
    target, draft = FakeTarget(faults=Faults(open={0: refusal})), reader()
    out, run_ = await run(context_of([target], [draft]), request_of(4))
    assert out == reference(PROMPT, params())
    assert [spec.hidden_state_layers for spec in target.specs] == [()]
    assert run_.metrics.num_draft_tokens == 0
    assert_all_closed(target, draft)


async def test_another_drafts_states_are_not_passed_on():
    """The second draft reads other layers than the target was asked for: it is told nothing."""
    drafts = [reader(quality=1.0), reader(quality=1.0, hidden_state_layers=(1,))]
    target = FakeTarget(latency_s=0.0005)
    context = context_of([target], drafts)
    run_ = Decoding(context, request_of(2, max_tokens=60))
    out = await run_with(run_, 20, lambda: kill_used(drafts))
    assert out == reference(PROMPT, run_.request.params)
    (other,) = [draft for draft in drafts if not draft.dead]
    assert other.num_opened == 1
    assert other.sessions[0].known_states == set()
    assert_all_closed(target, *drafts)


async def test_hidden_states_are_those_that_the_sessions_draft_reads():
    def router_of(*drafts):
        return context_of([FakeTarget()], drafts).router

    assert router_of().hidden_states_spec("s") == HiddenStateSpec()
    assert router_of(FakeDraft()).hidden_states_spec("s") == HiddenStateSpec()
    router = router_of(reader(last_hidden_state_only=True))
    assert router.hidden_states_spec("s") == HiddenStateSpec(LAYERS, True)
    router.down(router.drafts.replicas[0], "for a test")
    assert router.hidden_states_spec("s") == HiddenStateSpec(LAYERS, True)  # it may come back


async def test_leaving_early_closes_everything():
    target, draft = FakeTarget(latency_s=0.001), reader(quality=0.5)
    context: DecodingContext = context_of([target], [draft])
    task = asyncio.create_task(run(context, request_of(4, max_tokens=200)))
    await until(lambda: any(session.num_output > 10 for session in target.open_sessions))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    draft.dead = True
    target.dead = True
    with pytest.raises(Unavailable):
        await run(context, request_of(4, max_tokens=20))
    assert_all_closed(target, draft)
