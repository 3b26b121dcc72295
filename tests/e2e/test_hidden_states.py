"""Gateway, target and draft together: what a drafter reads are the target's states of the committed tokens, exactly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from functools import partial

import pytest
import torch

from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from engine.engine import Segment
from engine.loading.load import load_engine
from gateway.backends.draft import GrpcDraft
from gateway.backends.target import GrpcTarget
from gateway.decoding.context import DecodingContext
from gateway.decoding.draft_client import DraftClient
from gateway.decoding.loop import Decoding
from gateway.decoding.request import DecodingRequest
from gateway.decoding.target_client import TargetClient
from gateway.pacing.pace import FixedPace
from gateway.placement.routing import Replica, Router
from specdec import hidden_state_buffer as state_buffer
from specdec.params import SamplingParams
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.settings import GatewaySettings, ModelSettings, SchedulerSettings, ServerSettings, TargetSettings
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server
from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from tandem.bench.parts import time_parts
from target_service.core import TargetCore
from target_service.servicer import TargetServicer
from tests.llamas import build_llama, greedy_text
from tests.readers import StateReader
from tests.target_service.conftest import VOCAB, make_prompt
from tests.until import until

LAYERS = (2, 1, -1)
NUM_FEATURES = 3 * 32


#: Tokens of one multi-step request here: on a busy machine one for the rest of the text may leave no round to a draft.
MULTI_STEP_LEN = 4


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("gateway.decoding.draft_client.FIRST_BACKOFF_S", 0.001)


@pytest.fixture(autouse=True)
def short_multi_steps(monkeypatch):
    multi_step_decode = TargetClient.multi_step_decode

    def few(self, num_tokens):
        multi_step_decode(self, min(num_tokens, MULTI_STEP_LEN))

    monkeypatch.setattr(TargetClient, "multi_step_decode", few)


@pytest.fixture(scope="module")
def llama():
    return build_llama(vocab_size=VOCAB, num_hidden_layers=3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model_settings(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    llama.save_pretrained(folder)
    return ModelSettings(
        model=str(folder), device="cpu", dtype="float32", num_threads=1, kv_cache_memory_bytes=16 * 2**20
    )


@pytest.fixture(scope="module")
def exact(model_settings, llama):
    """``exact(tokens, dtype)``: states of the engine alone, in one piece, bytes by position; checked against
    transformers.
    """
    engine = load_engine(model_settings)

    @torch.no_grad()
    def rows(token_ids, dtype="") -> dict[int, bytes]:
        sequence = engine.pool.open(len(token_ids))
        segment = Segment(sequence, list(token_ids), 0, len(token_ids), LAYERS)
        of_pass = engine.forward_with_states([segment])[1]
        states, sent = of_pass.of(0), of_pass.rows(0, range(len(token_ids)), 0, dtype)
        engine.pool.release(sequence)
        stock = llama(torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([stock[layer][0] for layer in LAYERS], 1)
        torch.testing.assert_close(states.float(), expected, rtol=2**-8, atol=2e-4)
        return {i: sent.rows(i, i + 1).data for i in range(len(token_ids))}

    yield rows
    engine.close()


@pytest.fixture(scope="module")
def plain(llama):
    return partial(greedy_text, llama)


class Guesser:
    """Proposes the target's own text, with a mistake in every second proposal of a session; fails where told to."""

    def __init__(self, texts, fail_at=()):
        self.texts = texts
        self.fail_at = set(fail_at)
        self.rng = random.Random(1)
        self.num_calls = 0
        self.num_calls_of = Counter()

    def __call__(self, reading):
        assert reading.is_ready
        self.num_calls += 1
        if self.num_calls in self.fail_at:
            raise RuntimeError("a drafter that breaks")
        known = reading.token_ids
        text = next(text for text in self.texts if text[: len(known)] == known)
        drafted = text[len(known) : len(known) + 4]
        self.num_calls_of[id(reading)] += 1
        if drafted and self.num_calls_of[id(reading)] % 2:
            at = self.rng.randrange(len(drafted))
            drafted[at] = (drafted[at] + 1) % VOCAB
        return drafted


class FicklePace(FixedPace):
    """Drafts ``num_rounds`` times, then decodes in multi-step once, and so on."""

    def __init__(self, limit, num_rounds):
        super().__init__(limit)
        self.num_rounds = num_rounds
        self.num_asked = 0
        #: Verdicts of no round: the first one, then those of multi-step decode.
        self.num_plain = 0

    def num_draft_tokens(self, num_remaining, now_ns):
        super().num_draft_tokens(num_remaining, now_ns)
        if self.k:
            self.num_asked += 1
            self.k *= self.num_asked % (self.num_rounds + 1) > 0
        return self.k

    @property
    def is_settled(self):
        return False

    def record_plain(self, num_verdicts, num_tokens, timings, now_ns):
        self.num_plain += num_verdicts


@asynccontextmanager
async def service(model_settings, reader, transport):
    """A decoding context on a target and a draft; both know of no session in the end."""
    target = await TargetCore.start(
        TargetSettings(model=model_settings, scheduler=SchedulerSettings(max_num_batched_tokens=24))
    )
    draft = DraftCore(reader, SchedulerSettings())
    servers, channels = [], []
    backends = target, draft
    if transport == "grpc":
        for add, servicer, name in (
            (add_TargetServiceServicer_to_server, TargetServicer(target), "specdec.v1.TargetService"),
            (add_DraftServiceServicer_to_server, DraftServicer(draft), "specdec.v1.DraftService"),
        ):
            server = RpcServer(ServerSettings())
            server.add(add, servicer, name)
            await server.start()
            servers.append(server)
            channels.append(open_channel(server.address))
        backends = GrpcTarget(channels[0]), GrpcDraft(channels[1])
    router = Router([Replica("target", backends[0])], [Replica("draft", backends[1])])
    router.target_up(router.targets.replicas[0], await backends[0].info())
    router.draft_up(router.drafts.replicas[0], await backends[1].info())
    try:
        yield DecodingContext(router, GatewaySettings(fixed_draft_length=True))

        async def is_free():
            return (await target.load()).open_sessions == (await draft.load()).open_sessions == 0

        await until(is_free)
        assert reader.num_closed == len(reader.readings)
    finally:
        for channel in channels:
            await channel.close()
        for server in servers:
            await server.stop()
        await draft.close()
        await target.close()


async def decode(context, prompt, count, **changes):
    params = SamplingParams(temperature=0.0, max_tokens=count, seed=1, **changes.pop("params", {}))
    decoding = Decoding(context, DecodingRequest(prompt=prompt, params=params, num_speculative_tokens=4, **changes))
    out = []
    async with aclosing(decoding.verdicts()) as verdicts:
        async for verdict in verdicts:
            out += verdict.token_ids
    return out, decoding


def check(reading, exact, first=0, dtype=""):
    """All of a session's rows are exact, and none is missing behind the first."""
    rows = exact(reading.token_ids[:-1], dtype)
    assert reading.rows == {i: row for i, row in rows.items() if i >= first}


@pytest.mark.parametrize(
    ("transport", "num_sessions", "dtype"),
    [("in process", 1, ""), ("in process", 8, "int8"), ("grpc", 1, "int8_g32"), ("grpc", 8, ""), ("grpc", 8, "int8")],
)
async def test_every_state_is_exact(  # noqa: PLR0917
    model_settings, exact, plain, monkeypatch, transport, num_sessions, dtype
):
    """Long prompts in chunks, rejections, phases of multi-step decode, and states in several messages."""
    monkeypatch.setattr(state_buffer.pieces, "__defaults__", (7 * NUM_FEATURES * 2,))
    paces = []

    def pace(context, replica, limit, drafter):
        paces.append(FicklePace(limit, 3 + len(paces) % 3))
        return paces[-1]

    monkeypatch.setattr(DecodingContext, "pace", pace)
    prompts = [make_prompt(i, 10 + 17 * i) for i in range(num_sessions)]
    texts = [[*prompt, *plain(prompt, 70)] for prompt in prompts]
    reader = StateReader(Guesser(texts), LAYERS, dtype=dtype)
    async with service(model_settings, reader, transport) as context:
        answers = await asyncio.gather(*(decode(context, prompt, 60) for prompt in prompts))
    assert len(paces) == num_sessions
    assert all(pace.num_plain > 1 for pace in paces)
    for prompt, text, (out, decoding) in zip(prompts, texts, answers, strict=True):
        assert out == text[len(prompt) : len(prompt) + 60]
        assert decoding.metrics.num_accepted_draft_tokens > 0
        assert decoding.metrics.num_rejections > 0
        assert decoding.metrics.num_spec_steps >= 3
        (reading,) = [own for own in reader.readings if tuple(own.token_ids[: len(prompt)]) == prompt]
        assert len(reading.token_ids) > len(prompt) + 30
        # What came of multi-step decode last, and what the last verdict brought, the draft was not told.
        check(reading, exact, dtype=dtype)
        row_bytes = {"": 2 * NUM_FEATURES, "int8": NUM_FEATURES + 4 * 3, "int8_g32": NUM_FEATURES + 4 * 3}[dtype]
        assert decoding.metrics.hidden_state_bytes == row_bytes * decoding.metrics.num_hidden_states
        assert decoding.metrics.num_hidden_states >= len(reading.rows)


@pytest.mark.parametrize("transport", ["in process", "grpc"])
async def test_stop_tokens_and_a_conversation_with_a_name(model_settings, exact, plain, transport):
    prompt = next(p for p in (make_prompt(seed, 50) for seed in range(100)) if len(set(plain(p, 30))) > 15)
    text = plain(prompt, 60)
    stop = next(token for i, token in enumerate(text) if i > 15 and token not in text[:i])
    texts = [[*prompt, *text]]
    reader = StateReader(Guesser(texts), LAYERS)
    async with service(model_settings, reader, transport) as context:
        out, _ = await decode(context, prompt, 60, session_id="chat", params={"stop_token_ids": (stop,)})
        assert out == text[: text.index(stop) + 1]
        check(reader.readings[0], exact)
        follow = (*prompt, *out, *make_prompt(7, 30))
        texts.append([*follow, *plain(follow, 50)])
        again, decoding = await decode(context, follow, 40, session_id="chat")
        assert again == plain(follow, 40)
        num_cached = decoding.opened.num_cached_tokens
        assert num_cached == (len(prompt) + len(out) - 1) // 32 * 32, "the rest is less than a quarter of a block"
    check(reader.readings[1], exact, first=num_cached)


@pytest.mark.parametrize("transport", ["in process", "grpc"])
async def test_a_draft_that_breaks_goes_on_with_what_came_since(model_settings, exact, plain, monkeypatch, transport):
    request = DraftClient.request

    async def request_when_open(self, k, **given):
        if self._opening is not None and self.has_proposed:
            await asyncio.wait((self._opening,))
        return await request(self, k, **given)

    monkeypatch.setattr(DraftClient, "request", request_when_open)
    prompt = make_prompt(3, 40)
    texts = [[*prompt, *plain(prompt, 420)]]
    reader = StateReader(Guesser(texts, fail_at=(5, 12)), LAYERS)
    async with service(model_settings, reader, transport) as context:
        out, decoding = await decode(context, prompt, 400)
        assert out == texts[0][40:440]
    assert decoding.metrics.num_draft_failures == 2
    assert len(reader.readings) == 3
    check(reader.readings[0], exact)
    for before, reading in zip(reader.readings, reader.readings[1:], strict=False):
        first = min(reading.rows)
        assert first >= len(before.token_ids) - 1
        check(reading, exact, first=first)


async def test_the_newest_state_alone(model_settings, exact, plain):
    prompt = make_prompt(4, 60)
    texts = [[*prompt, *plain(prompt, 100)]]
    guesser = Guesser(texts)
    seen = {}

    def propose(reading):
        position = len(reading.token_ids) - 2
        seen[position] = reading.rows[position]
        return guesser(reading)

    reader = StateReader(propose, LAYERS, last_only=True)
    async with service(model_settings, reader, "grpc") as context:
        assert (await decode(context, prompt, 80))[0] == texts[0][60:140]
    rows = exact(texts[0][:140])
    assert len(seen) > 20
    assert seen == {position: rows[position] for position in seen}
    assert reader.readings[0].rows == seen


async def test_the_parts_of_a_round_are_timed_with_states(model_settings, plain):
    prompts = [make_prompt(seed, 20) for seed in (5, 6)]
    reader = StateReader(Guesser([[*prompt, *plain(prompt, 60)] for prompt in prompts]), LAYERS)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async with service(model_settings, reader, "grpc") as context:
        costs = await time_parts(context.router, [prompts], params, None, 4)
    # Each committed token's row travels twice.
    assert costs.wire_bytes > 2 * NUM_FEATURES * 2
    assert reader.propose.num_calls > 10
