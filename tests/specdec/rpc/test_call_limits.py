"""Clients that open calls and send nothing, or that never read: over real connections."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.rpc.channel import open_channel
from specdec.rpc.receiving import CHECK_INTERVAL_S, MAX_CHECKS
from specdec.rpc.server import RpcServer
from specdec.rpc.status import RETRY_AFTER_KEY
from specdec.settings import ServerSettings
from specdec.v1 import generation_service_pb2 as gen_pb
from specdec.v1 import generation_service_pb2_grpc as gen_grpc
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb
from tests.until import until

VERIFY = "/specdec.v1.TargetService/Verify"
INFO = "/specdec.v1.TargetService/GetModelInfo"
GENERATE = "/specdec.v1.GenerationService/Generate"


class Target(target_grpc.TargetServiceServicer):
    """Sends without end what nobody may read."""

    def __init__(self):
        self.num_open = self.num_sent = 0

    async def Verify(self, request_iterator, context):
        if await context.read() is grpc.aio.EOF:
            return
        self.num_open += 1
        try:
            while True:
                states = target_pb.VerifyResponse(hidden_states=pb.HiddenStates(data=bytes(100_000)))
                await context.write(states)
                self.num_sent += 1
        finally:
            self.num_open -= 1

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model=pb.ModelInfo(name="m"))


class Texts(gen_grpc.GenerationServiceServicer):
    def __init__(self):
        self.num_open = 0

    async def Generate(self, request, context):
        self.num_open += 1
        try:
            while True:
                yield gen_pb.GenerateResponse(text="x" * 100_000)
        finally:
            self.num_open -= 1


@asynccontextmanager
async def serving(**settings):
    server = RpcServer(ServerSettings(**settings))
    target, texts = Target(), Texts()
    server.add(target_grpc.add_TargetServiceServicer_to_server, target, "specdec.v1.TargetService")
    server.add(gen_grpc.add_GenerationServiceServicer_to_server, texts, "specdec.v1.GenerationService")
    await server.start()
    await server.set_serving(True)
    try:
        yield server, target, texts
    finally:
        await server.stop()


async def ask(address):
    """What an honest client does, on a connection of its own."""
    async with open_channel(address) as channel:
        stub = target_grpc.TargetServiceStub(channel)
        return (await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)).model.name


async def check_health(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def read_all(call):
    async with asyncio.timeout(30):
        while await call.read() is not grpc.aio.EOF:
            pass


def half_open(channel, method):
    """A call that never sends its message. A client streams where the method takes one message: same bytes."""
    return channel.stream_stream(method)()


@pytest.mark.parametrize("method", [VERIFY, INFO, GENERATE])
async def test_a_call_without_a_message_ends(method):
    async with serving(first_message_timeout_s=0.2) as (server, _, _), open_channel(server.address) as channel:
        call = half_open(channel, method)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no message came within 0.2 s" in await call.details()
        await until(lambda: not server.num_active_calls)


async def test_half_open_calls_keep_nobody_out():
    """As many as the limit allows, long before their deadline: others are served, and health on the same connection."""
    settings = {"max_concurrent_rpcs": 200, "first_message_timeout_s": 60.0}
    async with serving(**settings) as (server, _, _), open_channel(server.address) as channel:
        calls = [half_open(channel, (VERIFY, INFO, GENERATE)[i % 3]) for i in range(300)]
        await until(lambda: server.num_active_calls >= 200)
        begun = time.monotonic()
        for _ in range(5):
            assert await ask(server.address) == "m"
        assert await check_health(channel)
        assert time.monotonic() - begun < settings["first_message_timeout_s"] / 2
        ended = [call for call in calls if call.done()]
        assert len(ended) >= 100
        assert {await call.code() for call in ended} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()


async def test_few_messages_are_received_at_once():
    """Each takes memory. Those that are late make room for others; one that is alone has its time."""
    settings = {"max_receiving": 2, "first_message_timeout_s": 60.0}
    async with serving(**settings) as (server, _, _), open_channel(server.address) as channel:
        slow = half_open(channel, GENERATE)
        await until(lambda: server.num_active_calls == 1)
        for _ in range(MAX_CHECKS + 1):
            assert await ask(server.address) == "m"
            await asyncio.sleep(CHECK_INTERVAL_S)  # others that wait would have ended it by then
        assert not slow.done()
        crowd = [half_open(channel, INFO) for _ in range(20)]
        await until(lambda: server.num_active_calls == 21)
        begun = time.monotonic()
        assert await ask(server.address) == "m"
        assert await check_health(channel)
        assert time.monotonic() - begun < settings["first_message_timeout_s"] / 2
        assert await slow.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "did not come at once while others waited" in await slow.details()
        for call in crowd:
            call.cancel()
        await until(lambda: not server.num_active_calls)
        assert await ask(server.address) == "m"


async def test_a_client_has_so_many_health_calls(monkeypatch):
    """Watches stay open: on many connections one address could hold any number."""
    monkeypatch.setattr("specdec.rpc.interceptor.MAX_CLIENT_HEALTH_CALLS", 4)
    async with serving() as (server, _, _), AsyncExitStack() as stack:
        watches = []
        for _ in range(6):
            channel = await stack.enter_async_context(open_channel(server.address))
            watches.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await watches[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "one client has 4 health calls open" in await watches[0].details()
        assert await check_health(channel)
        for watch in watches[3:]:  # the check took the place of one more
            assert not watch.done()
            watch.cancel()


async def test_calls_in_progress_are_not_ended_for_new_ones():
    async with serving(max_concurrent_rpcs=2) as (server, target, _), open_channel(server.address) as channel:
        calls = [target_grpc.TargetServiceStub(channel).Verify() for _ in range(2)]
        for call in calls:
            await call.write(target_pb.VerifyRequest())
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(server.address)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check_health(channel), "health is always answered"
        assert target.num_open == 2
        for call in calls:
            call.cancel()


async def test_each_of_a_crowd_is_told_when_to_try_again():
    """They come at once: gRPC ends calls that the event loop has not taken yet with CANCELLED, and streams above its
    own limits with UNAVAILABLE.
    """
    async with serving() as (server, _, _), open_channel(server.address) as channel:
        await channel.channel_ready()
        stub = target_grpc.TargetServiceStub(channel)
        calls = [stub.GetModelInfo(pb.GetModelInfoRequest()) for _ in range(2_500)]
        await asyncio.wait([asyncio.ensure_future(call.code()) for call in calls])
        told = [call for call in calls if await call.code() is not grpc.StatusCode.OK]
        assert {await call.code() for call in told} <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in told:
            assert float(dict(await call.trailing_metadata())[RETRY_AFTER_KEY]) > 0
        assert await ask(server.address) == "m"


async def test_a_client_that_never_reads_is_left():
    async with serving(write_timeout_s=0.5) as (server, target, texts), open_channel(server.address) as channel:
        session = target_grpc.TargetServiceStub(channel).Verify()
        await session.write(target_pb.VerifyRequest())
        text = gen_grpc.GenerationServiceStub(channel).Generate(gen_pb.GenerateRequest())
        await until(lambda: target.num_open and texts.num_open)
        await until(lambda: not target.num_open and not texts.num_open)
        await until(lambda: not server.num_active_calls)
        assert await ask(server.address) == "m"
        for call in (text, session):  # once it reads, it is told
            with pytest.raises(grpc.aio.AioRpcError, match=r"took no message for 0\.5 s"):
                await read_all(call)


async def test_a_server_stops_though_a_client_reads_nothing():
    async with serving() as (server, target, _), open_channel(server.address) as channel:
        session = target_grpc.TargetServiceStub(channel).Verify()
        await session.write(target_pb.VerifyRequest())

        async def is_held_up():
            before = target.num_sent
            await ask(server.address)
            return before > 0 and target.num_sent == before

        await until(is_held_up)
        async with asyncio.timeout(server.settings.write_timeout_s / 2):
            await server.stop()
        assert not target.num_open
