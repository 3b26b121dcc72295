"""Servers, error mapping and session streams, over real connections."""

import asyncio
import logging
import socket
from functools import partial

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import errors
from specdec.rpc import server as server_module
from specdec.rpc.call import Call
from specdec.rpc.channel import (
    CHANNEL_OPTIONS,
    KEEPALIVE_TIME_MS,
    MAX_MESSAGE_BYTES,
    MIN_PING_INTERVAL_MS,
    open_channel,
)
from specdec.rpc.server import RpcServer
from specdec.rpc.session_stream import call_unary
from specdec.rpc.status import error_from_rpc
from specdec.settings import ServerSettings
from specdec.v1 import generation_service_pb2 as gen_pb
from specdec.v1 import generation_service_pb2_grpc as gen_grpc
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb
from tests.specdec.rpc.echo import Echo, open_message, round_message, serving
from tests.streams import streaming
from tests.until import until


class Texts(gen_grpc.GenerationServiceServicer):
    """An async generator that runs until it is stopped."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def Generate(self, request, context):
        try:
            while True:
                yield gen_pb.GenerateResponse(text="a")
                await asyncio.sleep(0)
        finally:
            self.closed.set()


async def test_messages_on_one_stream():
    async with serving() as (_, channel):
        stub = target_grpc.TargetServiceStub(channel)
        async with streaming(stub.Verify) as stream:
            assert (await stream.exchange(open_message())).opened.epoch == 1
            for length in range(20):
                assert (await stream.exchange(round_message(length))).verdict.base_len == length


async def test_leaving_a_stream_while_a_read_is_pending_cancels_the_server():
    echo = Echo()
    async with serving(echo) as (server, channel):
        async with streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
            read = asyncio.create_task(stream.exchange(open_message("hang")))
            await echo.hanging.wait()
            assert server.num_active_calls == 1
        await until(lambda: echo.ended)
        await until(lambda: server.num_active_calls == 0)
        with pytest.raises(errors.TandemError):
            await read
        await stream.close()
        with pytest.raises(errors.TandemError):
            await stream.exchange(open_message())


async def test_leaving_a_stream_before_its_handler_begins(monkeypatch):
    """The server counts the call no longer, though no handler of it ever ends."""
    echo, headers = Echo(), asyncio.Event()

    async def send_initial_metadata(call, metadata):
        headers.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Call, "send_initial_metadata", send_initial_metadata, raising=False)
    async with serving(echo) as (server, channel):
        async with streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
            stream.post(open_message("hang"))
            await headers.wait()
            assert server.num_active_calls == 1
        await until(lambda: server.num_active_calls == 0)
        assert not echo.hanging.is_set()
        assert not echo.ended


async def test_cancelling_the_caller_stays_a_cancellation():
    echo = Echo()
    async with serving(echo) as (_, channel):

        async def session():
            async with streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
                await stream.exchange(open_message("hang"))

        task = asyncio.create_task(session())
        await echo.hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: echo.ended)


async def test_the_end_of_a_stream_is_never_success():
    async with serving() as (_, channel), streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
        with pytest.raises(errors.Unavailable, match="ended the session"):
            await stream.exchange(open_message("end"))


async def test_the_deadline_of_a_stream():
    echo = Echo()
    async with serving(echo) as (_, channel):
        async with streaming(partial(target_grpc.TargetServiceStub(channel).Verify, timeout=0.3)) as stream:
            await stream.exchange(open_message())
            with pytest.raises(errors.DeadlineExceeded):
                await stream.receive()
        await until(lambda: echo.ended)


async def test_a_lost_server_is_unavailable():
    async with serving() as (server, channel), streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
        await stream.exchange(open_message())
        await server.stop()
        with pytest.raises(errors.Unavailable):
            await stream.exchange(round_message(1))
        with pytest.raises(errors.Unavailable):
            await call_unary(target_grpc.TargetServiceStub(channel).GetModelInfo, pb.GetModelInfoRequest())


@pytest.mark.parametrize(
    ("error", "code", "seen"),
    [
        (errors.InvalidRequest("top_k is -7", param="top_k"), "INVALID_ARGUMENT", errors.InvalidRequest),
        (errors.NotFound("no such model"), "NOT_FOUND", errors.NotFound),
        (errors.StaleSession("other epoch"), "FAILED_PRECONDITION", errors.StaleSession),
        (errors.Overloaded("full", retry_after_s=2.5), "RESOURCE_EXHAUSTED", errors.Overloaded),
        (errors.DeadlineExceeded("late"), "DEADLINE_EXCEEDED", errors.DeadlineExceeded),
        (errors.Cancelled("gone"), "CANCELLED", errors.Cancelled),
        (errors.Unavailable("draining"), "UNAVAILABLE", errors.Unavailable),
    ],
)
async def test_domain_errors_cross_the_wire(error, code, seen):
    echo = Echo()
    echo.error = error
    async with serving(echo) as (_, channel):
        stub = target_grpc.TargetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raw:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert raw.value.code().name == code
        with pytest.raises(seen) as rebuilt:
            await call_unary(stub.GetModelInfo, pb.GetModelInfoRequest())
        assert str(rebuilt.value) == str(error)
        assert getattr(rebuilt.value, "param", None) == getattr(error, "param", None)
        assert getattr(rebuilt.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        async with streaming(stub.Verify) as stream:
            with pytest.raises(seen, match=str(error)):
                await stream.exchange(open_message())


@pytest.mark.parametrize("error", [ValueError("secret path"), errors.InternalError("secret"), KeyError("secret")])
async def test_unexpected_errors_stay_in_the_log(error, caplog):
    echo = Echo()
    echo.error = error
    async with serving(echo) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as raw, caplog.at_level(logging.ERROR):
            await target_grpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
    assert raw.value.code() is grpc.StatusCode.INTERNAL
    assert raw.value.details() == errors.INTERNAL_TEXT
    assert isinstance(error_from_rpc(raw.value), errors.InternalError)
    if not isinstance(error, errors.TandemError):
        assert "secret" in caplog.text


async def test_a_generator_is_closed_as_soon_as_the_client_is_gone():
    texts = Texts()
    server = RpcServer(ServerSettings())
    server.add(gen_grpc.add_GenerationServiceServicer_to_server, texts, "specdec.v1.GenerationService")
    await server.start()
    async with open_channel(server.address) as channel:
        call = gen_grpc.GenerationServiceStub(channel).Generate(gen_pb.GenerateRequest())
        assert (await call.read()).text == "a"
        assert server.num_active_calls == 1
        call.cancel()
        async with asyncio.timeout(10):
            await texts.closed.wait()
        await until(lambda: not server.num_active_calls)
    await server.stop()


async def test_messages_above_grpcs_default_limit_pass_and_above_ours_do_not():
    async with serving() as (_, channel):
        stub = target_grpc.TargetServiceStub(channel)
        info = await call_unary(stub.GetModelInfo, pb.GetModelInfoRequest())
        assert len(info.model.name) == 8_000_000
        async with streaming(stub.Verify) as stream:
            with pytest.raises(errors.InvalidRequest, match="above the limit of 67108864"):
                await stream.exchange(open_message("s" * (MAX_MESSAGE_BYTES + 1)))


async def test_too_many_calls_are_refused():
    async with serving(max_concurrent_rpcs=2) as (_, channel):
        stub = target_grpc.TargetServiceStub(channel)
        async with streaming(stub.Verify) as one, streaming(stub.Verify) as two:
            await one.exchange(open_message())
            await two.exchange(open_message())
            async with streaming(stub.Verify) as three:
                with pytest.raises(errors.Overloaded):
                    await three.exchange(open_message())


@pytest.mark.parametrize("limit_ms", [100, pytest.param(300_000, marks=pytest.mark.exhaustive)])
async def test_an_idle_watch_outlives_its_pings(monkeypatch, limit_ms):
    """The limit on pings is really read: one of gRPC's five minutes cuts this watch with the second ping too many."""
    options = dict(server_module.SERVER_OPTIONS)
    [limit] = [name for name in options if "ping_interval" in name]
    options |= {limit: limit_ms, "grpc.http2.max_ping_strikes": 1}
    monkeypatch.setattr(server_module, "SERVER_OPTIONS", tuple(options.items()))
    server = RpcServer(ServerSettings())
    await server.start()
    async with open_channel(server.address, [("grpc.keepalive_time_ms", 200)]) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        if limit_ms == 100:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):  # a ping a second
                    await watch.read()
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
                await watch.read()
    await server.stop()


async def test_a_slow_handshake_is_waited_for():
    """The pause after a failed attempt to connect is short; an attempt itself may take longer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # it never answers
        async with open_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=0.5)
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_keepalive_is_slower_than_servers_tolerate():
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] == KEEPALIVE_TIME_MS >= 30_000 > MIN_PING_INTERVAL_MS
