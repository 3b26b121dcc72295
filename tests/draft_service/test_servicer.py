"""The service over real connections: a real server, a real stub."""

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.main import build_parser, make_service, settings_of
from draft_service.servicer import DraftServicer
from engine.sampling.sparse import unpack
from specdec import codec
from specdec.errors import InternalError, InvalidRequest, Overloaded, StaleSession, Unavailable
from specdec.rpc.channel import open_channel
from specdec.rpc.lifecycle import serve
from specdec.rpc.server import RpcServer
from specdec.rpc.session_stream import call_unary
from specdec.rules import Rule
from specdec.settings import DraftSettings, SchedulerSettings, ServerSettings, SpeculativeSettings
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from specdec.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.draft_service.conftest import make_spec
from tests.gateway.fake_draft import FakeDraft
from tests.streams import streaming
from tests.until import until

PROMPT = [3, 14, 15, 9, 26, 5]


def opening(spec):
    return codec.encode_open_draft(spec)


def advance(base_len, token_ids, num_draft_tokens, epoch=1, num_ahead_proposals=0):
    return pb.DraftRequest(
        advance=pb.Advance(
            epoch=epoch,
            base_len=base_len,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
            num_ahead_proposals=num_ahead_proposals,
        )
    )


@asynccontextmanager
async def serving(checkpoint, model_settings, **scheduler):
    service = make_service(
        DraftSettings(
            speculative=SpeculativeSettings(model=checkpoint),
            model=model_settings(checkpoint),
            scheduler=SchedulerSettings(**scheduler),
        )
    )
    server = RpcServer(ServerSettings())
    service.register(server)
    await server.start()
    channel = open_channel(server.address)
    try:
        yield service, server, channel
    finally:
        await channel.close()
        await service.drain()
        await server.stop()
        await service.stop()


async def until_free(core):
    async def is_free():
        load = await core.load()
        return load.open_sessions == load.used_blocks == 0

    await until(is_free)


@pytest.fixture
async def started(checkpoint, model_settings):
    async with serving(checkpoint, model_settings) as (service, _, channel):
        await service.start()
        yield service.core, DraftServiceStub(channel)
        await until_free(service.core)


async def test_a_session(started, spec, greedy):
    _, stub = started
    async with streaming(stub.Draft) as stream:
        opened = (await stream.exchange(opening(spec(PROMPT, epoch=1)))).opened
        assert (opened.epoch, opened.num_speculative_tokens, opened.num_cached_tokens) == (1, 4, 0)
        known = list(PROMPT)
        for token in range(5):
            proposal = (await stream.exchange(advance(len(known), [token, token + 1], 4))).proposal
            known += [token, token + 1]
            assert (proposal.epoch, proposal.base_len) == (1, len(known))
            assert tuple(proposal.token_ids) == greedy(known, 4)
            assert proposal.draft_ns > 0


async def test_q_rows_travel(started, spec):
    _, stub = started
    async with streaming(stub.Draft) as stream:
        await stream.exchange(opening(spec(PROMPT, rule=Rule.BLOCK, temperature=1.0)))
        proposal = codec.decode_proposal((await stream.exchange(advance(6, [1], 3))).proposal)
        assert len(proposal.token_ids) == len(proposal.q_rows) == 3
        for token, row in zip(proposal.token_ids, proposal.q_rows, strict=True):
            assert token in unpack(row)[0]


async def test_what_older_gateways_ask_ahead_of_verdicts_is_ignored(started, spec, greedy):
    _, stub = started
    async with streaming(stub.Draft) as stream:
        await stream.exchange(opening(spec(PROMPT)))
        await stream.send(advance(6, [1], 3, num_ahead_proposals=4))
        await stream.send(advance(7, [2], 0, num_ahead_proposals=4))
        await stream.send(advance(8, [3], 2, num_ahead_proposals=4))
        proposals = [(await stream.receive()).proposal]
        if proposals[0].base_len == 7:  # it was drafted before the next message came
            proposals.append((await stream.receive()).proposal)
        assert tuple(proposals[-1].token_ids) == greedy([*PROMPT, 1, 2, 3], 2)
        assert not any(proposal.assumed_token_ids for proposal in proposals)


async def test_model_info(started):
    _, stub = started
    answer = await call_unary(stub.GetModelInfo, types_pb.GetModelInfoRequest())
    assert (answer.model.method, answer.model.vocab_size, answer.model.num_speculative_tokens) == ("draft_model", 48, 4)
    assert answer.load.total_blocks > 0


async def test_messages_of_another_epoch_are_dropped_and_counted(started, spec):
    core, stub = started
    async with streaming(stub.Draft) as stream:
        await stream.exchange(opening(spec(PROMPT, epoch=2)))
        await stream.send(advance(6, [9, 9], 4, epoch=1))
        proposal = (await stream.exchange(advance(6, [1], 4, epoch=2))).proposal
        assert (proposal.epoch, proposal.base_len) == (2, 7)
        assert (await core.load()).stale_messages == 1


async def test_moving_and_overtaken_messages_are_not_answered(started, spec, greedy):
    _, stub = started
    async with streaming(stub.Draft) as stream:
        await stream.exchange(opening(spec(PROMPT)))
        known = list(PROMPT)
        for token in range(20):  # sent faster than they are answered
            await stream.send(advance(len(known), [token], 4 if token % 2 else 0))
            known.append(token)
        lengths = []
        while not lengths or lengths[-1] < len(known):  # the newest one is always worked on
            proposal = (await stream.receive()).proposal
            lengths.append(proposal.base_len)
            assert tuple(proposal.token_ids) == greedy(known[: proposal.base_len], 4)
        assert lengths == sorted(set(lengths))
        assert {(length - len(PROMPT)) % 2 for length in lengths} == {0}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([advance(0, [1], 4)], InvalidRequest),
        ([pb.DraftRequest()], InvalidRequest),
        (["open", advance(9, [1], 4)], StaleSession),
        (["open", advance(6, [999], 4)], InvalidRequest),
        (["open", "open"], InvalidRequest),
    ],
)
async def test_errors_end_the_stream_and_free_the_cache(started, spec, messages, error):
    _, stub = started
    async with streaming(stub.Draft) as stream:
        for message in messages:
            await stream.send(opening(spec(PROMPT)) if message == "open" else message)
        for _ in messages[1:]:
            assert (await stream.receive()).opened.epoch == 1
        with pytest.raises(error):
            await stream.receive()


async def test_every_way_a_stream_ends_frees_the_cache(started, spec):
    core, stub = started
    for ending in ("cancel", "half-close", "deadline", "silent", "mid-prefill"):
        prompt = [i % 48 for i in range(1000)] if ending == "mid-prefill" else PROMPT
        call = stub.Draft(timeout=1.0 if ending == "deadline" else None)
        await call.write(opening(spec(prompt)))
        if ending != "mid-prefill":
            assert (await call.read()).opened.epoch == 1
            await call.write(advance(6, [1], 4))
        match ending:
            case "cancel" | "mid-prefill":
                call.cancel()
            case "half-close":
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
            case "deadline":
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            case "silent":
                await call.read()
                call.cancel()
        await until_free(core)


async def test_many_sessions_at_once(started, spec, greedy):
    _, stub = started

    async def one(number):
        known = [number, number + 1, *PROMPT]
        async with streaming(stub.Draft) as stream:
            await stream.exchange(opening(spec(known, session_id=str(number))))
            for token in range(4):
                proposal = (await stream.exchange(advance(len(known), [token], 3))).proposal
                known.append(token)
                assert tuple(proposal.token_ids) == greedy(known, 3)

    await asyncio.gather(*(one(number) for number in range(16)))


async def test_before_the_model_is_loaded(checkpoint, model_settings, spec):
    async with serving(checkpoint, model_settings) as (service, server, channel):
        stub = DraftServiceStub(channel)
        with pytest.raises(Unavailable, match="loading"):
            await call_unary(stub.GetModelInfo, types_pb.GetModelInfoRequest())
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="specdec.v1.DraftService")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await service.start()
        await server.set_serving(True)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING


async def test_overload_says_when_to_come_back(checkpoint, model_settings, spec):
    async with serving(checkpoint, model_settings, max_num_seqs=1, max_waiting=1) as (service, _, channel):
        await service.start()
        stub = DraftServiceStub(channel)
        async with streaming(stub.Draft) as first, streaming(stub.Draft) as second:
            await first.exchange(opening(spec(PROMPT)))
            with pytest.raises(Overloaded, match="1 of 1") as caught:
                await second.exchange(opening(spec(PROMPT)))
            assert caught.value.retry_after_s > 0


def test_flags_become_settings():
    draft, server = settings_of(build_parser().parse_args([]))
    assert draft == DraftSettings(speculative=SpeculativeSettings())
    assert server == ServerSettings()
    args = [
        "--method",
        "ngram",
        "--prompt-lookup-max",
        "6",
        "--num-speculative-tokens",
        "8",
        "--port",
        "5",
        "--max-num-seqs",
        "3",
    ]
    draft, server = settings_of(build_parser().parse_args(args))
    assert draft.speculative == SpeculativeSettings(method="ngram", prompt_lookup_max=6, num_speculative_tokens=8)
    assert (draft.model, draft.scheduler.max_num_seqs, server.port) == (None, 3, 5)
    draft, _ = settings_of(build_parser().parse_args(["--model", "m", "--dtype", "bfloat16", "--num-threads", "2"]))
    assert draft.speculative.method == "draft_model"
    assert (draft.model.model, draft.model.dtype, draft.model.num_threads) == ("m", "bfloat16", 2)
    suffix = ["--method", "suffix", "--suffix-decoding-max-tree-depth", "9", "--suffix-decoding-min-token-prob", "0.5"]
    draft, _ = settings_of(build_parser().parse_args([*suffix, "--suffix-decoding-max-cached-requests", "0"]))
    assert (draft.speculative.method, draft.model) == ("suffix", None)
    assert draft.speculative.suffix_decoding_max_tree_depth == 9
    assert draft.speculative.suffix_decoding_min_token_prob == 0.5
    assert draft.speculative.suffix_decoding_max_cached_requests == 0
    both = ["--method", "suffix", "--method", "eagle3", "--model", "m", "--target-model", "t"]
    draft, _ = settings_of(build_parser().parse_args(both))
    assert draft.speculative.method == ("suffix", "eagle3")
    assert (draft.model.model, draft.target_model) == ("m", "t")
    with pytest.raises(InvalidRequest, match="target_model"):
        settings_of(build_parser().parse_args(both[:-2]))
    with pytest.raises(InvalidRequest, match="prompt_lookup_min"):
        settings_of(build_parser().parse_args(["--prompt-lookup-min", "9"]))


def test_process_without_torch():
    """``python -m draft_service --method ngram`` starts, serves, stops on SIGTERM, and never imports torch."""
    code = (
        "import sys; from draft_service.main import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, "--method", "ngram"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert '"ready"' in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


async def test_a_call_that_is_cancelled_twice_closes_its_session():
    """By its client and by the server's end: the second time while it waits for the first to take effect."""

    class Context:
        def __init__(self):
            self.requests = [opening(make_spec(PROMPT))]
            self.opened = asyncio.Event()

        async def read(self):
            return self.requests.pop() if self.requests else await asyncio.Event().wait()

        async def write(self, message):
            self.opened.set()

    backend, context, complaints = FakeDraft(), Context(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    call = asyncio.create_task(DraftServicer(backend).Draft(None, context))
    await context.opened.wait()
    for _ in range(2):
        await asyncio.sleep(0)
        call.cancel()
    await asyncio.wait((call,))
    async with asyncio.timeout(30):
        while backend.open_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert not complaints


async def test_an_error_of_the_batcher_ends_the_process(monkeypatch):
    """The client is told, whatever it waits for."""
    service = make_service(DraftSettings(speculative=SpeculativeSettings(method="ngram")))
    register, servers, ready = service.register, [], asyncio.Event()
    monkeypatch.setattr(service, "register", lambda server: servers.append(server) or register(server))
    process = asyncio.create_task(serve(service, ServerSettings(drain_s=60), on_ready=ready.set))
    await ready.wait()
    async with open_channel(servers[0].address) as channel, streaming(DraftServiceStub(channel).Draft) as stream:
        await stream.exchange(opening(make_spec(PROMPT)))
        monkeypatch.setattr(service.core.batcher, "_next_batch", lambda: 1 / 0)
        async with asyncio.timeout(30):
            with pytest.raises(InternalError):
                await stream.exchange(advance(len(PROMPT), [1], 4))
            with pytest.raises(InternalError, match="draft-batcher ended by an unexpected error"):
                await process
