"""Calls with more headers than any client needs, over raw connections that acknowledge no settings."""

import asyncio
import logging
import ssl
import time
from collections import namedtuple
from contextlib import asynccontextmanager, nullcontext, suppress

import grpc
import pytest
from grpc._cython import cygrpc

from specdec.rpc import server as rpc_server
from specdec.rpc.channel import open_channel
from specdec.rpc.metadata_limit import MAX_HEADERS, limit_metadata
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as pb
from tandem.certificates import write_certificates
from tests.specdec.rpc.header_flood import EMPTY_DATE, header_flood, literal_header
from tests.until import until

HEADERS = {"one byte": EMPTY_DATE, "literal": literal_header("a", "b"), "not UTF-8": literal_header("a", "\xff")}
NUM_HEADERS = 100_000


class Names(target_grpc.TargetServiceServicer):
    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model=pb.ModelInfo(name="m"))


@asynccontextmanager
async def serving(enter=lambda context: nullcontext(), **settings):
    server = RpcServer(ServerSettings(**settings), enter=enter)
    server.add(target_grpc.add_TargetServiceServicer_to_server, Names(), "specdec.v1.TargetService")
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop()


async def ask(server, **options):
    async with open_channel(server.address) as channel:
        return (
            await target_grpc.TargetServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), **options)
        ).model.name


async def flood(port, header, *, end, tls=None):
    """Send, and wait for the end of the stream or close at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        writer.write(header_flood(header, NUM_HEADERS, end=end))
        await writer.drain()
        if end:
            await reader.readuntil(b"grpc-status")
    finally:
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):  # what the server sends meanwhile is not read
            await writer.wait_closed()


def seconds_of_pairs():
    """What it takes this machine to make as many pairs as one flood has headers."""
    pair = namedtuple("pair", ("key", "value"))
    begun = time.thread_time()
    tuple(pair(f"{i}", "b") for i in range(NUM_HEADERS))
    return time.thread_time() - begun


@pytest.mark.parametrize("end", [False, True], ids=["closed", "ended"])
@pytest.mark.parametrize("header", HEADERS)
async def test_a_flood_costs_the_event_loop_nothing(header, end, caplog, capfd):
    """The time of its thread, which other processes do not lengthen. Unbounded, each flood costs two lots of pairs."""
    served = []
    async with serving(lambda context: nullcontext(served.append(context))) as server:
        assert await ask(server) == "m"
        floods = [asyncio.to_thread(asyncio.run, flood(server.port, HEADERS[header], end=end)) for _ in range(2)]
        begun = time.thread_time()
        await asyncio.gather(*floods)
        assert await ask(server) == "m"
        await until(lambda: end or "more than 1024 headers" in caplog.text)
        assert time.thread_time() - begun < seconds_of_pairs()
    assert len(served) == 2, "no flood reached a handler"
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_flood_over_tls(tmp_path, caplog):
    write_certificates(tmp_path)
    files = {
        f"ssl_{name}": str(tmp_path / "target" / file)
        for name, file in (("certfile", "cert.pem"), ("keyfile", "key.pem"))
    }
    tls = ssl.create_default_context(cafile=tmp_path / "target" / "ca.pem")
    tls.set_alpn_protocols(["h2"])
    async with serving(**files) as server:
        await asyncio.to_thread(asyncio.run, flood(server.port, EMPTY_DATE, end=False, tls=tls))
        await until(lambda: "more than 1024 headers" in caplog.text)


async def test_unfinished_headers_are_not_kept(monkeypatch):
    """A client in the middle of its headers cannot acknowledge the settings, and what it has sent takes memory."""
    options = dict(rpc_server.SERVER_OPTIONS) | {"grpc.http2.settings_timeout": 200}
    monkeypatch.setattr(rpc_server, "SERVER_OPTIONS", tuple(options.items()))
    assert rpc_server.SETTINGS_TIMEOUT_MS <= 5000
    async with serving() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(header_flood(EMPTY_DATE, 1000))
        async with asyncio.timeout(30):
            assert (await reader.read()).startswith(b"\x00"), "settings, and then the end"
        writer.close()


async def test_many_headers_are_no_flood():
    """As many as the core lets an honest client send: 16 KiB, at 34 bytes and more each; below 8 KiB for certain."""
    async with serving() as server:
        assert await ask(server, metadata=[("a", "b")] * 200) == "m"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(server, metadata=[("a", "b")] * 1000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_loop_that_ends_in_a_call_leaves_nothing_for_the_next_one():
    """The limit is of one step of a task, also where a stopped loop left its last step unfinished."""
    limit_metadata()

    async def make(count, steps):
        for _ in range(steps):
            for i in range(count):
                cygrpc._Metadatum(f"{i}", "b")  # noqa: SLF001 (what gRPC calls for each header)
            if steps == 1:
                asyncio.get_running_loop().stop()
            await asyncio.sleep(0)

    stopped = asyncio.new_event_loop()
    task = stopped.create_task(make(1, 1))
    stopped.run_forever()
    asyncio.run(make(MAX_HEADERS // 2, 5))
    task.cancel()
    stopped.run_until_complete(asyncio.wait([task]))
    stopped.close()
