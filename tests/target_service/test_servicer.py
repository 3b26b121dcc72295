"""The target over gRPC: a real server, a real stub."""

import asyncio
from functools import partial

import grpc
import pytest

from specdec import codec, errors
from specdec.rpc.session_stream import SessionStream, call_unary
from specdec.types import FinishReason, Proposal
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb
from target_service.servicer import MAX_GATHER_S, MIN_GATHER_S, gather_time_ns
from tests.streams import streaming
from tests.target_service.conftest import VOCAB, make_prompt, make_spec, num_waiting, until_clean
from tests.target_service.scheduler.watch import Watch
from tests.until import until


class Client:
    """A session's messages as plain data."""

    def __init__(self, stub, spec, **options):
        self.spec = spec
        self.stream = SessionStream(partial(stub.Verify, **options))

    async def __aenter__(self):
        await self.stream.send(codec.encode_open_target(self.spec))
        return self

    async def __aexit__(self, *_):
        await self.stream.close()

    async def open(self):
        self.opened = codec.decode_target_opened((await self.stream.receive()).opened)
        self.first = await self.verdict()
        return self.first

    async def verdict(self):
        return codec.decode_verdict((await self.stream.receive()).verdict)

    async def tokens(self, count):
        """The next ``count`` tokens, however they are cut into verdicts."""
        tokens = []
        while len(tokens) < count:
            tokens += (await self.verdict()).token_ids
        return tokens

    async def send_round(self, committed_len, token_ids=(), epoch=1, **parts):
        proposal = Proposal(epoch, parts.pop("base_len", committed_len), tuple(token_ids), **parts)
        await self.send_proposal(proposal, committed_len)

    async def send_proposal(self, proposal, committed_len=None):
        committed_len = proposal.base_len if committed_len is None else committed_len
        message = pb.Round(epoch=proposal.epoch, committed_len=committed_len, proposal=codec.encode_proposal(proposal))
        await self.stream.send(pb.VerifyRequest(round=message))

    async def send_ahead(self, committed_len, num_tokens, epoch=1):
        message = pb.MultiStepDecode(epoch=epoch, committed_len=committed_len, num_tokens=num_tokens)
        await self.stream.send(pb.VerifyRequest(multi_step_decode=message))


@pytest.mark.parametrize("k", [0, 3])
async def test_rounds_over_the_wire(start_core, serve, plain, k):
    prompt = make_prompt(0)
    text = plain(prompt, 24)
    async with start_core() as core, serve(core) as (stub, _):
        async with Client(stub, make_spec(prompt, 24)) as client:
            verdict = await client.open()
            tokens = list(verdict.token_ids)
            while verdict.finish_reason is None:
                n, done = len(prompt) + len(tokens), len(tokens)
                await client.send_round(n, text[done : done + k])
                verdict = await client.verdict()
                assert verdict.base_len == n
                tokens += verdict.token_ids
        assert tuple(tokens) == text
        assert verdict.finish_reason is FinishReason.LENGTH
        assert client.opened.prefill_ns > 0


async def test_a_round_without_a_proposal_is_one_plain_step(start_core, serve, plain):
    prompt = make_prompt(1)
    async with start_core() as core, serve(core) as (stub, _), Client(stub, make_spec(prompt, 5)) as client:
        n = (await client.open()).committed_len
        await client.stream.send(pb.VerifyRequest(round=pb.Round(epoch=1, committed_len=n)))
        assert (await client.verdict()).token_ids == plain(prompt, 2)[1:]


async def test_multi_step_decode_over_the_wire(start_core, serve, plain):
    prompt = make_prompt(2)
    text = plain(prompt, 40)
    async with (
        start_core() as core,
        serve(core) as (stub, _),
        Client(stub, make_spec(prompt, 40, multi_step_tokens=10)) as client,
    ):
        n = (await client.open()).committed_len
        tokens = [*client.first.token_ids, *await client.tokens(10)]
        await client.send_ahead(n + 10, 5)
        await client.send_ahead(n + 10, 8)  # before the answers: up to n + 18
        tokens += await client.tokens(8)
        await client.send_round(n + 18, text[19:23])
        tokens += (await client.verdict()).token_ids
        await client.send_ahead(n + 23, 100)
        while (verdict := await client.verdict()).finish_reason is None:
            tokens += verdict.token_ids
        assert (*tokens, *verdict.token_ids) == text


async def test_sessions_that_wait_for_rounds_do_not_delay_messages(start_core, serve, plain):
    """Tokens of multi-step decode gather for the sake of other sessions in multi-step decode alone."""
    prompt = make_prompt(0)
    async with start_core() as core, serve(core) as (stub, _):
        waiting = [await core.open(make_spec(make_prompt(seed), 8)) for seed in range(1, 9)]
        watch = Watch(core)
        watch.delay_s = MIN_GATHER_S
        async with Client(stub, make_spec(prompt, 31)) as client:
            n = (await client.open()).committed_len
            await client.send_ahead(n, 30)
            verdicts = [await client.verdict()]
            while verdicts[-1].finish_reason is None:
                verdicts.append(await client.verdict())
        assert tuple(token for verdict in verdicts for token in verdict.token_ids) == plain(prompt, 31)[1:]
        assert len(verdicts) > 20
        for session in waiting:
            await session.close()


def test_messages_gather_for_a_limited_time():
    assert gather_time_ns(0, 2, MIN_GATHER_S) == gather_time_ns(1, 2, MIN_GATHER_S) == 1e9 * MIN_GATHER_S
    assert gather_time_ns(8, 2, MIN_GATHER_S) == 14_000_000
    assert gather_time_ns(256, 2, MIN_GATHER_S) == gather_time_ns(10**6, 2, MIN_GATHER_S) == 1e9 * MAX_GATHER_S


async def test_stale_messages_are_dropped_and_counted(start_core, serve, plain):
    prompt = make_prompt(3)
    async with start_core() as core, serve(core) as (stub, _):
        async with Client(stub, make_spec(prompt, 10, epoch=4)) as client:
            n = (await client.open()).committed_len
            await client.send_round(n, (1,), epoch=3)
            await client.send_ahead(n, 2, epoch=5)
            await client.send_round(n - 1, (1,), epoch=4)
            await client.send_ahead(n + 1, 2, epoch=4)
            await client.send_round(n, (), epoch=4)
            verdict = await client.verdict()
            assert (verdict.epoch, verdict.base_len, verdict.token_ids) == (4, n, plain(prompt, 2)[1:])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.verdict(), 0.05)
        info = await call_unary(stub.GetModelInfo, types_pb.GetModelInfoRequest())
        assert codec.decode_load(info.load).stale_messages == 4
        assert codec.decode_model_info(info.model) == await core.info()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.VerifyRequest(round=pb.Round(epoch=1)), "first message of a stream must be open"),
        (pb.VerifyRequest(), "first message of a stream must be open"),
        (pb.VerifyRequest(open=pb.OpenTargetSession(max_tokens=3)), "prompt_len is 0"),
        (
            pb.VerifyRequest(open=pb.OpenTargetSession(token_ids=[1], prompt_len=1, max_tokens=0)),
            "max_tokens is 0",
        ),
        (
            pb.VerifyRequest(open=pb.OpenTargetSession(token_ids=[VOCAB], prompt_len=1, max_tokens=3)),
            f"token {VOCAB}",
        ),
    ],
)
async def test_first_messages_that_are_refused(start_core, serve, message, text):
    async with start_core() as core, serve(core) as (stub, _), streaming(stub.Verify) as stream:
        with pytest.raises(errors.InvalidRequest, match=text):
            await stream.exchange(message)


async def test_proposals_that_are_refused_end_the_session(start_core, serve):
    tree = {"parents": (-1, -1)}
    async with start_core() as core, serve(core) as (stub, _):
        for ids, parts, text in [
            ((1, 1), tree, "siblings must differ"),
            ((VOCAB,), {}, "tokens are 0 to"),
            ((1,) * 9, {}, "9 tokens"),
            ((1,), {"base_len": 1}, "carries a proposal for 1"),
        ]:
            async with Client(stub, make_spec(make_prompt(0), 20)) as client:
                n = (await client.open()).committed_len
                await client.send_round(n, ids, **parts)
                with pytest.raises(errors.InvalidRequest, match=text):
                    await client.verdict()
            await until_clean(core)


async def test_a_round_ahead_of_its_verdict_is_refused_and_another_session_takes_its_place(start_core, serve, plain):
    """As older gateways do with what they cannot have: the text goes on without drafts."""
    prompt = make_prompt(0)
    text = plain(prompt, 20)
    async with start_core() as core, serve(core) as (stub, _):
        async with Client(stub, make_spec(prompt, 20)) as client:
            n = (await client.open()).committed_len
            proposal = types_pb.Proposal(epoch=1, base_len=n, assumed_token_ids=text[1:2], token_ids=text[2:4])
            message = pb.Round(epoch=1, committed_len=n + 1, proposal=proposal)
            await client.stream.send(pb.VerifyRequest(round=message))
            with pytest.raises(errors.InvalidRequest, match="assumes 1 tokens that are not committed"):
                await client.verdict()
        async with Client(stub, make_spec(prompt, 20)) as client:
            n = (await client.open()).committed_len
            await client.send_ahead(n, 19)
            assert tuple(await client.tokens(19)) == text[1:]
        await until_clean(core)


async def test_a_second_open_is_refused(start_core, serve):
    async with start_core() as core, serve(core) as (stub, _), Client(stub, make_spec(make_prompt(0))) as client:
        await client.open()
        await client.stream.send(codec.encode_open_target(client.spec))
        with pytest.raises(errors.InvalidRequest, match="only the first message"):
            await client.verdict()


async def test_a_gateway_that_does_not_know_packed_logprobs_gets_them_as_messages(start_core, serve):
    answers = []
    async with start_core() as core, serve(core) as (stub, _):
        for knows in (True, False):
            client = Client(stub, make_spec(make_prompt(0), 1, logprobs=2, prompt_logprobs=1))
            request = codec.encode_open_target(client.spec)
            request.open.packs_logprobs = knows
            await client.stream.send(request)
            answers.append([await client.stream.receive(), await client.stream.receive()])
            await client.stream.close()
    for (opened, verdict), is_packed in zip(answers, (True, False), strict=True):
        positions = [*opened.opened.prompt_logprobs, *verdict.verdict.logprobs]
        assert {(len(each.top) > 0, len(each.packed_top) > 0) for each in positions} == {(not is_packed, is_packed)}
    packed, plain = (
        (codec.decode_logprobs(opened.opened.prompt_logprobs), codec.decode_verdict(verdict.verdict).logprobs)
        for opened, verdict in answers
    )
    assert packed == plain


async def test_overload_crosses_the_wire_with_its_numbers(start_core, serve):
    async with (
        start_core(max_num_seqs=1, max_wait_s=0.05) as core,
        serve(core) as (stub, _),
        Client(stub, make_spec(make_prompt(0))) as one,
    ):
        await one.open()
        async with Client(stub, make_spec(make_prompt(1))) as two:
            with pytest.raises(errors.Overloaded, match="1 of 1 sessions open"):
                await two.open()


# --- leaving ---


async def test_a_client_that_goes_away_at_any_moment_leaves_nothing(start_core, serve, caplog):
    async with start_core(max_num_seqs=2, max_num_batched_tokens=32) as core, serve(core) as (stub, server):
        for after_s in (0.0, 0.001, 0.003, 0.01, 0.02, 0.04):
            for spec in (
                make_spec(make_prompt(0, 150), 50),
                make_spec(make_prompt(0, 5), 200, multi_step_tokens=200),
            ):
                async with Client(stub, spec), Client(stub, spec), Client(stub, spec):
                    await asyncio.sleep(after_s)  # any moment does
                await until_clean(core)
                await until(lambda: server.num_active_calls == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_breaks_out_without_closing_leaves_nothing(start_core, serve):
    async with start_core() as core, serve(core) as (stub, server):
        call = stub.Verify()
        await call.write(codec.encode_open_target(make_spec(make_prompt(0))))
        await call.read()
        assert (await core.load()).open_sessions == 1
        del call
        await until_clean(core)
        await until(lambda: server.num_active_calls == 0)


async def test_half_close_ends_the_session(start_core, serve):
    async with start_core() as core, serve(core) as (stub, _):
        call = stub.Verify()
        await call.write(codec.encode_open_target(make_spec(make_prompt(0))))
        await call.read()
        await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        await until_clean(core)


async def test_a_deadline_in_the_middle(start_core, serve):
    async with start_core() as core, serve(core) as (stub, _):
        async with Client(stub, make_spec(make_prompt(0)), timeout=1.0) as client:
            await client.open()
            with pytest.raises(errors.DeadlineExceeded):
                await client.verdict()
        await until_clean(core)


async def test_a_deadline_while_waiting_for_a_place(start_core, serve):
    async with (
        start_core(max_num_seqs=1) as core,
        serve(core) as (stub, _),
        Client(stub, make_spec(make_prompt(0))) as one,
    ):
        await one.open()
        async with Client(stub, make_spec(make_prompt(1)), timeout=0.1) as two:
            with pytest.raises(errors.DeadlineExceeded):
                await two.open()

        async def nobody_waits() -> bool:
            return not await num_waiting(core)

        await until(nobody_waits)


async def test_a_prompt_seen_before_over_the_wire(start_core, serve, plain):
    prompt = make_prompt(5, 30)
    async with start_core() as core, serve(core) as (stub, _):
        for cached in (0, 29):
            async with Client(stub, make_spec(prompt, 6)) as client:
                assert (await client.open()).token_ids == plain(prompt, 1)
                assert client.opened.num_cached_tokens == cached
            await until_clean(core)


async def test_while_loading_calls_are_refused(serve):
    async with serve(None) as (stub, _):
        with pytest.raises(errors.Unavailable, match="still loading"):
            await call_unary(stub.GetModelInfo, types_pb.GetModelInfoRequest())
        # Nothing is sent: gRPC loses the reason where it ends a stream to which the client is writing.
        stream = SessionStream(stub.Verify)
        with pytest.raises(errors.Unavailable, match="still loading"):
            await stream.receive()
        await stream.close()


async def test_shutdown_lets_sessions_end_and_then_ends_them(start_core, serve, plain):
    prompt = make_prompt(6)
    async with (
        start_core() as core,
        serve(core, drain_s=0.2) as (stub, server),
        Client(stub, make_spec(prompt, 30)) as client,
    ):
        n = (await client.open()).committed_len
        core.drain()
        drain = asyncio.create_task(server.drain())
        await asyncio.sleep(0)  # it begins
        await client.send_round(n)
        assert (await client.verdict()).token_ids == plain(prompt, 2)[1:]
        assert not await drain
        await server.stop()
        await until_clean(core)
        with pytest.raises(errors.Unavailable, match="shutting down"):
            await client.verdict()
