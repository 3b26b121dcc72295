"""Lookups beside the decoding loop: the text is the target's, whatever is found, and whenever a round arrives."""

import asyncio
import contextlib
import random

import pytest

from gateway.access.caller import Caller
from gateway.decoding.lookup_client import MAX_TOKENS_AT_ONCE, LookupClient
from gateway.decoding.loop import Decoding
from gateway.decoding.plain_reason import PlainReason
from gateway.decoding.request import DecodingRequest, RequestState
from gateway.pacing.lookup_pacer import LookupPace, LookupPacer
from gateway.pacing.pace import FixedPace
from specdec.errors import InvalidRequest, Unavailable
from specdec.lookup.base import Match
from specdec.lookup.registry import make_lookup
from specdec.settings import LookupSettings
from tests.gateway.decoding.decodings import PROMPT, assert_all_closed, context_of, request_of, run
from tests.gateway.fake_draft import FakeDraft
from tests.gateway.fakes import FakeTarget, Faults, next_token, params, reference, share
from tests.pairwise import parametrize_pairwise

pytestmark = pytest.mark.usefixtures("short_pauses")


def repetitive(context, params, vocab_size=64):
    """A target that repeats nine tokens of ten after a period of twelve."""
    if share("new", len(context)) < 0.1 or len(context) < 15:
        return next_token(context, params, vocab_size)
    return context[-12]


def target_of(**kwargs):
    return FakeTarget(next_token=repetitive, **kwargs)


def wanted(request):
    return reference(PROMPT, request.params, repetitive)


class Whim(LookupPace):
    """Drafts now and then, some tokens, at random."""

    def __init__(self, random):
        super().__init__(LookupPacer())
        self.random = random

    def looks_up(self):
        return True

    def num_draft_tokens(self, match, speedup):
        return self.random.choice((0, 1, 3, len(match.token_ids)))


@parametrize_pairwise(
    {"seed": range(8), "lookup": [("ngram",), ("suffix",), ("ngram", "suffix")], "temperature": [0.0, 1.0]}
)
async def test_any_order_of_events(seed, lookup, temperature):
    schedule = random.Random(seed)
    target = target_of(latency_s=iter(lambda: schedule.randrange(6), -1))
    draft = FakeDraft(next_token=repetitive, quality=0.7, latency_s=iter(lambda: schedule.randrange(12), -1))
    context = context_of([target], [draft] if seed % 2 else [], lookup=lookup)
    context.lookup_pace = lambda replica, methods, is_predicted: Whim(schedule)
    request = request_of(6, temperature=temperature, max_tokens=150)
    outs = await asyncio.gather(*(run(context, request) for _ in range(3)))
    for out, decoding in outs:
        assert out == wanted(request)
        assert decoding.metrics.num_accepted_draft_tokens > 10
    assert target.num_early_rounds > 0 or seed % 2, "without a draft, rounds also take the place of multi-step tokens"
    assert sum(decoding.metrics.draft_ns for _, decoding in outs) == target.draft_ns
    assert_all_closed(target, draft)


class Witness(FixedPace):
    """Notes the tokens of each verdict that is told as a plain one, and how many verdicts count for nothing."""

    def __init__(self):
        super().__init__(0)
        self.plain, self.num_skipped = [], 0

    def record_plain(self, num_verdicts, num_tokens, timings, now_ns):
        self.plain.append(num_tokens / num_verdicts)

    def skip(self, timings, now_ns):
        self.num_skipped += 1


async def test_rounds_that_were_looked_up_are_no_plain_decoding():
    context, witness = context_of([target_of(latency_s=0.0005)], lookup=("suffix",)), Witness()
    context.pace = lambda *_: witness
    _, decoding = await run(context, request_of(6, max_tokens=100))
    assert decoding.metrics.num_spec_steps == witness.num_skipped > 5
    assert set(witness.plain) == {1}


@pytest.mark.parametrize("event", ["open", "verify", "multi_step"])
async def test_a_target_lost_at_every_step(event):
    for index in range(20):
        target, spare = target_of(faults=Faults(**{event: {index: Unavailable("gone")}})), target_of()
        context = context_of([target, spare], lookup=("ngram",))
        out, decoding = await run(context, request_of(6, max_tokens=60))
        assert out == wanted(decoding.request)
        assert_all_closed(target, spare)


async def test_a_lost_draft_leaves_the_lookups():
    draft = FakeDraft(faults=Faults(propose=lambda _: Unavailable("gone")))
    target = target_of(latency_s=0.0005)
    out, decoding = await run(context_of([target], [draft], lookup=("suffix",)), request_of(6, max_tokens=100))
    assert out == wanted(decoding.request)
    assert decoding.metrics.num_draft_failures >= 1
    assert decoding.metrics.num_accepted_draft_tokens > 20
    assert_all_closed(target, draft)


async def test_a_model_drafts_where_only_short_matches_are_found():
    """Of the first lookup a long match counts, of the last any, and none while a model is asked."""
    state = RequestState(DecodingRequest(prompt=(1, 2, 3, 4, 9, 4), params=params(), num_speculative_tokens=4))
    client = LookupClient([make_lookup("ngram", LookupSettings(prompt_lookup_max=2))], state)
    client.start()
    assert client.find(4, only_long=False) == Match((9, 4, 9, 4), 1)
    assert client.find(4, only_long=True) is None
    state.commit((9,))
    client.commit()
    assert client.find(1, only_long=True) == Match((4,), 2)
    assert client.find(0, only_long=False) is None


async def test_a_long_prompt_is_ingested_between_other_tasks():
    prompt = tuple(range(4 * MAX_TOKENS_AT_ONCE))
    state = RequestState(DecodingRequest(prompt=prompt, params=params(), num_speculative_tokens=4))
    client = LookupClient([make_lookup("ngram", LookupSettings())], state)
    client.start()
    state.commit((5, 6))
    client.commit()
    passes = 0
    while client.find(2, only_long=False) is None:
        await asyncio.sleep(0)
        passes += 1
    assert passes >= 4
    assert client.find(2, only_long=True) is None
    assert client.find(2, only_long=False) == Match((7, 8), 2)
    client.close()


async def test_past_outputs_are_drafts_for_the_same_key_only():
    target = FakeTarget(latency_s=0.0005)
    context = context_of([target], lookup=("suffix",))
    accepted = []
    for key in ("alice", "alice", "bob"):
        request = DecodingRequest(
            prompt=PROMPT, params=params(temperature=0.0), num_speculative_tokens=8, caller=Caller(key)
        )
        out, decoding = await run(context, request)
        assert out == reference(PROMPT, params(temperature=0.0))
        accepted.append(decoding.metrics.num_accepted_draft_tokens)
        await asyncio.sleep(0)
    first, again, other = accepted
    assert again > first + 20
    assert other == first


@pytest.mark.parametrize(("step", "reason"), [(1, PlainReason.NO_PROPOSAL), (0, PlainReason.PACING)])
async def test_why_nothing_was_speculated(step, reason):
    class Never(LookupPace):
        def looks_up(self):
            return True

        def num_draft_tokens(self, match, speedup):
            return 0

    context = context_of([FakeTarget(next_token=lambda context, *_: 8 + step * len(context))], lookup=("ngram",))
    context.pace = lambda *_: FixedPace(0)
    context.lookup_pace = lambda replica, methods, is_predicted: Never(LookupPacer())
    request = DecodingRequest(prompt=PROMPT, params=params(max_tokens=12), num_speculative_tokens=4)
    decoding = Decoding(context, request)
    async with contextlib.aclosing(decoding.verdicts()) as verdicts:
        async for _ in verdicts:
            pass
    assert decoding.plain_reason() == reason


async def test_without_lookups_and_drafts_there_is_no_draft():
    _, decoding = await run(context_of([FakeTarget()]), request_of(4, max_tokens=12))
    assert decoding.plain_reason() == PlainReason.NO_DRAFT


async def test_a_target_that_refuses_what_was_looked_up_decodes_without():
    """The model behind a target may have changed since the past outputs."""
    target = target_of(faults=Faults(verify={2: InvalidRequest("no such token")}))
    out, decoding = await run(context_of([target], lookup=("suffix",)), request_of(6, max_tokens=80))
    assert out == wanted(decoding.request)
    assert decoding.metrics.num_target_failures == 1
    assert decoding.metrics.num_spec_steps == 2
    assert_all_closed(target)


async def test_what_an_embedded_target_refuses_at_once():
    """No message lies between: the call raises. Nothing was drafted."""
    target = target_of(faults=Faults(offer={0: InvalidRequest("no such token")}))
    out, decoding = await run(context_of([target], lookup=("suffix",)), request_of(6, max_tokens=80))
    assert out == wanted(decoding.request)
    metrics = decoding.metrics
    assert (metrics.num_spec_steps, metrics.num_received_draft_tokens, metrics.num_target_failures) == (0, 0, 0)
    assert_all_closed(target)


async def test_a_look_up_that_fails_leaves_no_session_behind():
    class Broken:
        def open(self, spec):
            raise MemoryError

    context = context_of([target_of()], lookup=("suffix",))
    context.lookups = {"suffix": Broken()}
    with pytest.raises(MemoryError):
        await run(context, request_of(6))
    assert context.open_sessions == 0


async def test_past_outputs_are_whole():
    context = context_of([target_of()], lookup=("suffix",))
    out, _ = await run(context, request_of(6, max_tokens=50))
    await asyncio.sleep(0)
    cache = context.lookups["suffix"].past.of("").cache
    assert cache.size.num_tokens == len(out) == 50
    assert cache.count(out[-4:]) >= 1
