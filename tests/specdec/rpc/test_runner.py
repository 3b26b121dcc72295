"""The life of a service process: order of start and stop, signals, the ready line."""

import asyncio
import json
import os
import signal

import pytest

from specdec import errors
from specdec.rpc.channel import open_channel
from specdec.rpc.lifecycle import run, serve
from specdec.rpc.session_stream import call_unary
from specdec.settings import ServerSettings
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb
from tests.streams import streaming
from tests.until import until


class Fake(target_grpc.TargetServiceServicer):
    """Writes down what happens to it; ``events`` holds the order."""

    name = "fake"

    def __init__(self, start_s=0.0, error=None):
        self.events = []
        self.start_s = start_s
        self.error = error
        self.failure = None
        self.failed = asyncio.Event()

    def register(self, server):
        self.server = server
        server.add(target_grpc.add_TargetServiceServicer_to_server, self, "specdec.v1.TargetService")

    async def start(self):
        self.events.append("start")
        try:
            await asyncio.sleep(self.start_s)
        except asyncio.CancelledError:
            self.events.append("start cancelled")
            raise
        if self.error is not None:
            raise self.error

    async def wait_failed(self):
        await self.failed.wait()
        return self.failure

    async def drain(self):
        self.events.append("drain")

    async def stop(self):
        self.events.append("stop")

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse()

    async def Verify(self, request_iterator, context):
        try:
            async for _ in request_iterator:
                yield target_pb.VerifyResponse()
        finally:
            self.events.append("stream ended")


async def test_start_serve_stop():
    service, ready = Fake(), asyncio.Event()
    task = asyncio.create_task(serve(service, ServerSettings(), on_ready=ready.set))
    await ready.wait()
    async with open_channel(service.server.address) as channel:
        await call_unary(target_grpc.TargetServiceStub(channel).GetModelInfo, pb.GetModelInfoRequest())
    os.kill(os.getpid(), signal.SIGTERM)
    await task
    assert service.events == ["start", "drain", "stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_starting_stops_at_once(number):
    service = Fake(start_s=60)
    task = asyncio.create_task(serve(service, ServerSettings(), on_ready=lambda: pytest.fail("not ready")))
    await until(lambda: service.events)
    os.kill(os.getpid(), number)
    async with asyncio.timeout(30):  # far less than the start takes
        await task
    assert service.events == ["start", "start cancelled", "drain", "stop"]


async def test_a_start_that_fails_is_cleaned_up():
    service = Fake(error=errors.ModelNotSupported("cannot run it"))
    with pytest.raises(errors.ModelNotSupported):
        await serve(service, ServerSettings())
    assert service.events == ["start", "stop"]


async def test_a_service_that_fails_ends_the_process(capsys):
    service, ready = Fake(), asyncio.Event()
    task = asyncio.create_task(serve(service, ServerSettings(), on_ready=ready.set))
    await ready.wait()
    service.failure = errors.InternalError("broken")
    service.failed.set()
    with pytest.raises(errors.InternalError, match="broken"):
        await task
    assert service.events == ["start", "drain", "stop"]


async def test_open_streams_hold_up_the_stop_until_a_second_signal():
    service, ready = Fake(), asyncio.Event()
    task = asyncio.create_task(serve(service, ServerSettings(drain_s=60), on_ready=ready.set))
    await ready.wait()
    async with (
        open_channel(service.server.address) as channel,
        streaming(target_grpc.TargetServiceStub(channel).Verify) as stream,
    ):
        await stream.exchange(target_pb.VerifyRequest())
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: "drain" in service.events)
        await stream.exchange(target_pb.VerifyRequest())
        assert service.events == ["start", "drain"]
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await task
    assert service.events == ["start", "drain", "stream ended", "stop"]


async def test_streams_that_end_let_the_stop_go_on():
    service, ready, stop = Fake(), asyncio.Event(), asyncio.Event()
    settings = ServerSettings(drain_s=60)
    task = asyncio.create_task(serve(service, settings, stop=stop, on_ready=ready.set))
    await ready.wait()
    async with open_channel(service.server.address) as channel:
        async with streaming(target_grpc.TargetServiceStub(channel).Verify) as stream:
            await stream.exchange(target_pb.VerifyRequest())
            stop.set()
            await until(lambda: "drain" in service.events)
        async with asyncio.timeout(30):
            await task
    assert service.events == ["start", "drain", "stream ended", "stop"]


async def test_the_ready_line(capsys):
    service, stop = Fake(), asyncio.Event()
    out = []
    task = asyncio.create_task(serve(service, ServerSettings(), stop=stop))
    await until(lambda: out.append(capsys.readouterr().out) or out[-1])
    line = json.loads(out[-1])
    assert line == {
        "event": "ready",
        "service": "fake",
        "host": "127.0.0.1",
        "port": service.server.port,
        "pid": os.getpid(),
    }
    stop.set()
    await task


def test_a_failed_start_is_one_line_and_a_status(capsys):
    assert run(lambda: Fake(error=errors.InvalidRequest("no such folder")), ServerSettings()) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: no such folder"
