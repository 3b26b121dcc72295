"""Bytes that are no message, and errors while a message is still being written, over real connections."""

import asyncio
import logging

import grpc
import grpc.aio
import pytest

from specdec.errors import InvalidRequest, Unavailable
from specdec.rpc.channel import open_channel
from specdec.rpc.server import RpcServer
from specdec.rpc.session_stream import SessionStream, call_unary
from specdec.rpc.stream_writer import StreamWriter
from specdec.settings import ServerSettings
from specdec.v1 import generation_service_pb2 as gen_pb
from specdec.v1 import generation_service_pb2_grpc as gen_grpc
from specdec.v1 import target_service_pb2 as pb
from specdec.v1 import target_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2

#: A field of a length that the message does not have.
GARBAGE = b"\x0a\xff\xff\xff\x7f"


class Target(pb_grpc.TargetServiceServicer):
    """Answers the first message, and then fails while large messages are being sent."""

    async def Verify(self, request_iterator, context):
        await context.read()
        writer = StreamWriter(context.write)
        try:
            for _ in range(4):
                writer.post(pb.VerifyResponse(hidden_states=types_pb2.HiddenStates(data=bytes(2**20))))
            raise InvalidRequest("no such state", param="hidden_states")
        finally:
            await writer.close()

    async def GetModelInfo(self, request, context):
        return types_pb2.GetModelInfoResponse()


class Generation(gen_grpc.GenerationServiceServicer):
    async def Generate(self, request, context):
        yield gen_pb.GenerateResponse()

    async def Tokenize(self, request, context):
        return gen_pb.TokenizeResponse()


@pytest.fixture
async def channel():
    server = RpcServer(ServerSettings())
    server.add(pb_grpc.add_TargetServiceServicer_to_server, Target(), "specdec.v1.TargetService")
    server.add(gen_grpc.add_GenerationServiceServicer_to_server, Generation(), "specdec.v1.GenerationService")
    await server.start()
    async with open_channel(server.address) as opened:
        yield opened
    await server.stop()


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("unary_unary", "/specdec.v1.TargetService/GetModelInfo"),
        ("unary_unary", "/specdec.v1.GenerationService/Tokenize"),
        ("unary_stream", "/specdec.v1.GenerationService/Generate"),
        ("stream_stream", "/specdec.v1.TargetService/Verify"),
        ("unary_unary", "/grpc.health.v1.Health/Check"),
        ("unary_stream", "/grpc.health.v1.Health/Watch"),
        ("stream_stream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
)
async def test_undecodable_requests_are_invalid_and_leave_no_traceback(channel, kind, method, caplog):
    call = getattr(channel, kind)(method)
    request = iter((GARBAGE,)) if kind.startswith("stream") else GARBAGE
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(30):
            answer = call(request)
            assert await answer.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "cannot be decoded" in await answer.details()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


async def test_an_error_while_the_first_message_is_being_written_reaches_the_client(channel, caplog):
    """The first write sends the headers, too: an error on top of it used to be refused by gRPC, and the client hung."""

    async def exchange(stream):
        await stream.send(pb.VerifyRequest())
        while True:
            await stream.receive()

    for _ in range(5):
        stream = SessionStream(pb_grpc.TargetServiceStub(channel).Verify)
        with pytest.raises(InvalidRequest, match="no such state") as caught:
            await asyncio.wait_for(exchange(stream), 10)
        assert caught.value.param == "hidden_states"
        await stream.close()
    assert "TOO_MANY_OPERATIONS" not in caplog.text


async def test_undecodable_answers_are_a_lost_server():
    async def verify(request, context):
        await context.read()
        await context.write(GARBAGE)
        await context.read()

    async def describe(request, context):
        return GARBAGE

    server = grpc.aio.server()
    handlers = {
        "Verify": grpc.stream_stream_rpc_method_handler(verify),
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(describe),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdec.v1.TargetService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.TargetServiceStub(channel)
        stream = SessionStream(stub.Verify)
        with pytest.raises(Unavailable, match="cannot be decoded"):
            await stream.exchange(pb.VerifyRequest())
        await stream.close()
        with pytest.raises(Unavailable, match="cannot be decoded"):
            await call_unary(stub.GetModelInfo, types_pb2.GetModelInfoRequest())
    await server.stop(None)
