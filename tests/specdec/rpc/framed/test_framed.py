"""Framed calls behave as gRPC's: messages, errors, limits, draining, and ends on both sides."""

import asyncio
import json
import os
import socket
import struct
import tempfile
import time
from contextlib import asynccontextmanager

import pytest

from specdec import errors
from specdec.rpc import server as rpc_server
from specdec.rpc.channel import open_channel
from specdec.rpc.framed import connection as connection_module
from specdec.rpc.framed import server as server_module
from specdec.rpc.framed.address import MAX_PATH_BYTES, framed_path
from specdec.rpc.framed.frame import FrameKind, encode_frame, encode_json
from specdec.rpc.framed.stream import FramedStream
from specdec.rpc.session_stream import SessionStream
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import target_service_pb2_grpc as target_grpc
from tests.specdec.rpc.echo import NAME, Echo, open_message, round_message, serving
from tests.specdec.rpc.framed.other_process import served_elsewhere
from tests.until import until

VERIFY = f"/{NAME}/Verify"


@asynccontextmanager
async def framed(folder, servicer=None, **settings):
    async with serving(servicer or Echo(), socket=f"unix:{folder}/s", **settings) as (server, _):
        yield server, framed_path(f"unix:{folder}/s")


@asynccontextmanager
async def opened(path, method=VERIFY, metadata=()):
    stream = await FramedStream.open(path, method, target_pb.VerifyResponse.FromString, metadata)
    try:
        yield stream
    finally:
        await stream.close()


async def raw_answer(path, *frames):
    """The status that bytes of our own are answered with."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        for frame in frames:
            writer.write(frame)
        return await next_status(reader)
    finally:
        writer.close()


async def next_status(reader):
    async with asyncio.timeout(30):
        size, kind = struct.unpack("<IB", await reader.readexactly(5))
        assert kind == FrameKind.STATUS
        return json.loads(await reader.readexactly(size))


@asynccontextmanager
async def answering(folder, answer):
    """The path of a server that sends these bytes to every client, and reads nothing."""
    transports = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport):
            transports.append(transport)
            transport.pause_reading()
            transport.write(answer)

    path = f"{folder}/fake"
    server = await asyncio.get_running_loop().create_unix_server(Server, path)
    try:
        yield path
    finally:
        server.close()
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)


async def test_messages_on_one_stream(tmp_path):
    async with framed(tmp_path) as (server, path), opened(path) as stream:
        assert (await stream.exchange(open_message())).opened.epoch == 1
        for length in range(20):
            assert (await stream.exchange(round_message(length))).verdict.base_len == length
        for length in range(5):
            stream.post(round_message(length))
        assert [(await stream.receive()).verdict.base_len for _ in range(5)] == list(range(5))
        assert server.num_active_calls == 1


async def test_only_its_user_may_connect_and_the_name_goes_with_the_server(tmp_path):
    async with framed(tmp_path) as (_, path):
        assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        await FramedStream.open(path, VERIFY, target_pb.VerifyResponse.FromString)


async def test_the_name_that_a_killed_server_left_is_taken(tmp_path):
    path = framed_path(f"unix:{tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with pytest.raises(ConnectionRefusedError):
        await FramedStream.open(path, VERIFY, target_pb.VerifyResponse.FromString)
    async with framed(tmp_path) as (_, path), opened(path) as stream:
        assert (await stream.exchange(open_message())).opened.epoch == 1


async def test_a_file_at_the_name_is_kept(tmp_path):
    path = tmp_path / "s.framed"
    path.write_text("a file of somebody")
    with pytest.raises(errors.InvalidRequest, match="name is taken"):
        async with framed(tmp_path):
            pass
    assert path.read_text() == "a file of somebody"


@pytest.mark.parametrize("num_bytes", [MAX_PATH_BYTES - 7, MAX_PATH_BYTES - 6, MAX_PATH_BYTES])
async def test_a_path_that_is_too_long_for_the_framed_socket_serves_grpc(num_bytes):
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/".ljust(num_bytes + len("unix:"), "s")
        path = framed_path(address)
        assert (path is None) == (num_bytes > MAX_PATH_BYTES - 7)
        async with serving(socket=address), open_channel(address) as channel:
            stub = target_grpc.TargetServiceStub(channel)
            stream = SessionStream(stub.Verify)
            assert (await stream.exchange(open_message())).opened.epoch == 1
            await stream.close()
            if path is not None:
                async with opened(path) as stream:
                    assert (await stream.exchange(open_message())).opened.epoch == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("top_k is -7", param="top_k"),
        errors.Overloaded("full", retry_after_s=2.5),
        errors.StaleSession("other epoch"),
        errors.Cancelled("gone"),
        errors.Unavailable("draining"),
    ],
)
async def test_domain_errors_cross_the_wire(tmp_path, error):
    echo = Echo()
    echo.error = error
    async with framed(tmp_path, echo) as (server, path), opened(path) as stream:
        for _ in range(2):  # the second time of what was seen the first time
            with pytest.raises(type(error)) as rebuilt:
                await stream.exchange(open_message())
            assert str(rebuilt.value) == str(error)
            assert getattr(rebuilt.value, "param", None) == getattr(error, "param", None)
            assert getattr(rebuilt.value, "retry_after_s", None) == getattr(error, "retry_after_s", None)
        assert not server.num_active_calls


async def test_unexpected_errors_stay_in_the_log(tmp_path, caplog):
    echo = Echo()
    echo.error = ValueError("secret path")
    async with framed(tmp_path, echo) as (_, path), opened(path) as stream:
        with pytest.raises(errors.InternalError) as rebuilt:
            await stream.exchange(open_message())
    assert "secret" not in str(rebuilt.value)
    assert "secret path" in caplog.text


async def test_the_end_of_a_stream_is_never_success(tmp_path):
    async with framed(tmp_path) as (_, path), opened(path) as stream:
        with pytest.raises(errors.Unavailable, match="ended the session"):
            await stream.exchange(open_message("end"))


async def test_leaving_cancels_the_server(tmp_path):
    echo = Echo()
    async with framed(tmp_path, echo) as (server, path):
        async with opened(path) as stream:
            read = asyncio.create_task(stream.exchange(open_message("hang")))
            await echo.hanging.wait()
            assert server.num_active_calls == 1
        with pytest.raises(errors.Unavailable, match="stream is over"):
            await read
        await until(lambda: echo.ended and not server.num_active_calls)
        await stream.close()
        with pytest.raises(errors.Unavailable):
            await stream.exchange(open_message())


async def test_a_server_that_stops_says_so(tmp_path):
    async with framed(tmp_path) as (server, path), opened(path) as stream:
        await stream.exchange(open_message())
        await server.stop()
        with pytest.raises(errors.Unavailable, match="shutting down"):
            await stream.exchange(round_message(1))


async def test_a_draining_server_refuses_new_calls_and_lets_open_ones_end(tmp_path):
    async with framed(tmp_path, drain_s=10.0) as (server, path), opened(path) as stream:
        await stream.exchange(open_message())
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        async with opened(path) as late:
            with pytest.raises(errors.Unavailable, match="shutting down"):
                await late.exchange(open_message())
        assert (await stream.exchange(round_message(7))).verdict.base_len == 7
        await stream.close()
        assert await draining


async def test_a_status_reaches_a_client_that_still_writes(tmp_path):
    with served_elsewhere(tmp_path, max_concurrent_rpcs=1) as path:
        async with opened(path) as stream:
            assert (await stream.exchange(open_message())).opened.epoch == 1
            for _ in range(3):
                async with opened(path) as refused:
                    time.sleep(0.1)  # noqa: ASYNC251 (encodes a long prompt; the server refuses the call meanwhile)
                    with pytest.raises(errors.Overloaded, match="1 calls are open") as rebuilt:
                        await refused.exchange(open_message())
                    assert rebuilt.value.retry_after_s
            stream.write_message(b"\xff")
            time.sleep(0.1)  # noqa: ASYNC251
            stream.post(round_message(1))
            with pytest.raises(errors.InvalidRequest, match="cannot be decoded"):
                await stream.receive()


async def test_a_client_that_does_not_take_its_status_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 0.2)
    async with framed(tmp_path, max_concurrent_rpcs=1) as (_, path), opened(path) as one:
        await one.exchange(open_message())
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]))
        assert (await next_status(reader))["code"] == "RESOURCE_EXHAUSTED"
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_a_call_ends_with_one_status_and_its_handler_releases_all(tmp_path):
    class Slow(Echo):
        async def Verify(self, request_iterator, context):
            try:
                await context.read()
                await asyncio.Event().wait()
            finally:
                self.leaving = True
                await self.released.wait()
                self.ended.append("all is released")

    echo = Slow()
    echo.leaving = False
    async with framed(tmp_path, echo) as (server, path):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]) + encode_frame(FrameKind.MESSAGE, b""))
        await until(lambda: server.num_active_calls == 1)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 2)
        assert (await next_status(reader))["code"] == "INVALID_ARGUMENT"
        await until(lambda: echo.leaving)
        writer.write(b"and more of it")
        other = await raw_answer(path, encode_frame(FrameKind.HEADERS, b"{"))  # the server has read both by now
        assert other["code"] == "INVALID_ARGUMENT"
        writer.write_eof()
        async with asyncio.timeout(30):
            assert await reader.read() == b""  # no second status
        writer.close()
        echo.released.set()
        await until(lambda: not server.num_active_calls)
        assert echo.ended == ["all is released"]


async def test_closing_does_not_wait_for_a_server_that_does_not_read(tmp_path):
    async with answering(tmp_path, b"") as path, opened(path) as stream:
        stream.post(open_message("s" * 8 * 2**20))
        await stream.close()
        async with asyncio.timeout(30):
            with pytest.raises(errors.Unavailable, match="stream is over"):
                await stream.receive()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"code": "OK"',
        b'{"code": "INTERNAL", "text": "x"}',
        b'{"code": "INTERNAL", "text": "x", "metadata": 5}',
        b'{"code": "INVALID_ARGUMENT", "text": "x", "metadata": [["tandem-param", 5]]}',
        b'{"code": "RESOURCE_EXHAUSTED", "text": "x", "metadata": [["tandem-retry-after-s", "soon"]]}',
        b"[" * 60_000,
        b"\xff",
    ],
)
async def test_a_status_that_cannot_be_read_is_unavailable(tmp_path, content):
    async with answering(tmp_path, encode_frame(FrameKind.STATUS, content)) as path, opened(path) as stream:
        async with asyncio.timeout(30):
            with pytest.raises(errors.Unavailable, match="cannot be decoded: its status"):
                await stream.receive()


async def test_a_stream_that_is_given_up_says_why(tmp_path):
    async with answering(tmp_path, b"") as path, opened(path) as stream:
        read = asyncio.create_task(stream.receive())
        await asyncio.sleep(0)
        stream.give_up(errors.Unavailable("the health watch was lost"))
        async with asyncio.timeout(30):
            with pytest.raises(errors.Unavailable, match="health watch"):
                await read


async def test_sessions_are_limited_as_calls_and_not_as_connections_of_the_port(tmp_path):
    async with framed(tmp_path, max_connections=1) as (_, path), opened(path) as one, opened(path) as two:
        for stream in (one, two):
            assert (await stream.exchange(open_message())).opened.epoch == 1


async def test_too_many_calls_and_connections_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rpc_server, "SPARE_CONNECTIONS", 1)
    async with framed(tmp_path, max_concurrent_rpcs=2) as (_, path), opened(path) as one, opened(path) as two:
        await one.exchange(open_message())
        await two.exchange(open_message())
        async with opened(path) as three:
            with pytest.raises(errors.Overloaded, match="2 calls are open"):
                await three.exchange(open_message())
        idle = [await asyncio.open_unix_connection(path) for _ in range(2)]
        async with opened(path) as four:
            with pytest.raises(errors.Overloaded, match="connections are open"):
                await four.exchange(open_message())
        for _, writer in idle:
            writer.close()


async def test_messages_above_the_limit_are_refused_on_both_sides(tmp_path):
    async with framed(tmp_path) as (_, path):
        async with opened(path) as stream:
            with pytest.raises(errors.InvalidRequest, match="above the limit of 67108864"):
                stream.post(open_message("s" * (64 * 2**20 + 1)))
        headers = encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[])
        status = await raw_answer(path, headers, struct.pack("<IB", 64 * 2**20 + 1, FrameKind.MESSAGE))
    assert status["code"] == "INVALID_ARGUMENT"
    assert "above the limit of 67108864" in status["text"]


async def test_a_server_may_have_a_lower_limit_of_messages(tmp_path):
    async with framed(tmp_path, max_message_bytes=1000) as (_, path), opened(path) as stream:
        assert (await stream.exchange(open_message("s" * 900))).opened.epoch == 1
        with pytest.raises(errors.InvalidRequest, match="above the limit of 1000"):
            await stream.exchange(open_message("s" * 1000))


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([encode_json(FrameKind.HEADERS, method="/no.Such/Method", metadata=[])], "UNIMPLEMENTED"),
        ([encode_json(FrameKind.HEADERS, method=f"/{NAME}/GetModelInfo", metadata=[])], "UNIMPLEMENTED"),
        ([encode_frame(FrameKind.HEADERS, b"{")], "INVALID_ARGUMENT"),
        ([encode_frame(FrameKind.HEADERS, b"[" * 60_000)], "INVALID_ARGUMENT"),
        ([encode_json(FrameKind.HEADERS, method=VERIFY)], "INVALID_ARGUMENT"),
        ([encode_json(FrameKind.HEADERS, method=[], metadata=[])], "INVALID_ARGUMENT"),
        ([encode_json(FrameKind.STATUS, code="OK")], "INVALID_ARGUMENT"),
        ([encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[])] * 2, "INVALID_ARGUMENT"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "INVALID_ARGUMENT"),
        ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], "INVALID_ARGUMENT"),
        (
            [encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]), encode_frame(FrameKind.MESSAGE, b"\xff")],
            "INVALID_ARGUMENT",
        ),
    ],
)
async def test_what_is_no_call_is_refused(tmp_path, frames, code):
    async with framed(tmp_path) as (server, path):
        assert (await raw_answer(path, *frames))["code"] == code
        await until(lambda: not server.num_active_calls)
        async with opened(path) as stream:
            assert (await stream.exchange(open_message())).opened.epoch == 1


async def test_frames_may_come_in_any_pieces(tmp_path):
    message = open_message().SerializeToString()
    frames = encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]) + encode_frame(FrameKind.MESSAGE, message)
    async with framed(tmp_path) as (_, path):
        reader, writer = await asyncio.open_unix_connection(path)
        for byte in frames:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            size, kind = struct.unpack("<IB", await reader.readexactly(5))
            assert kind == FrameKind.MESSAGE
            assert target_pb.VerifyResponse.FromString(await reader.readexactly(size)).opened.epoch == 1
        writer.close()


async def test_connections_without_headers_and_calls_without_a_message_end(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "CLIENT_TIMEOUT_S", 0.2)
    async with framed(tmp_path, first_message_timeout_s=0.3) as (server, path):
        reader, writer = await asyncio.open_unix_connection(path)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        status = await raw_answer(path, encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]))
        assert status["code"] == "DEADLINE_EXCEEDED"
        assert not server.num_active_calls


async def test_a_client_that_never_reads_is_left(tmp_path):
    class Flood(Echo):
        async def Verify(self, request_iterator, context):
            await context.read()
            while True:
                await context.write(target_pb.VerifyResponse(verdict=target_pb.Verdict(token_ids=[1] * 100_000)))

    async with framed(tmp_path, Flood(), write_timeout_s=0.5) as (server, path):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(
                encode_json(FrameKind.HEADERS, method=VERIFY, metadata=[]) + encode_frame(FrameKind.MESSAGE, b"")
            )
            await until(lambda: server.num_active_calls == 1)
            await until(lambda: not server.num_active_calls)


async def test_a_server_that_reads_slowly_holds_its_client_up(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "MAX_WAITING_BYTES", 10_000)
    echo = Echo()
    async with framed(tmp_path, echo) as (_, path), opened(path) as stream:
        stream.post(round_message(999))
        for _ in range(100):
            stream.post(open_message("x" * 50_000))
        sent = asyncio.create_task(stream.drain())
        assert not (await asyncio.wait((sent,), timeout=0.1))[0]
        echo.released.set()
        assert (await stream.receive()).verdict.base_len == 999
        for _ in range(100):
            assert (await stream.receive()).opened.epoch == 1
        await sent


async def test_metadata_reaches_the_handler(tmp_path):
    class Metadata(Echo):
        async def Verify(self, request_iterator, context):
            self.metadata = tuple(context.invocation_metadata())
            await super().Verify(request_iterator, context)

    servicer = Metadata()
    async with framed(tmp_path, servicer) as (_, path), opened(path, metadata=(("traceparent", "00-1"),)) as stream:
        await stream.exchange(open_message())
        assert servicer.metadata == (("traceparent", "00-1"),)
