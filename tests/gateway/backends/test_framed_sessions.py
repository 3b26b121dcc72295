"""Sessions with a server on this machine: framed where it listens so, and ended where it stops without a word."""

import asyncio
import os
import signal
import socket
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from gateway.backends.target import GrpcTarget
from specdec.errors import Unavailable
from specdec.rpc.channel import open_channel
from specdec.rpc.framed.address import framed_path
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from specdec.types import SessionSpec
from specdec.v1 import target_service_pb2_grpc as target_grpc
from target_service.servicer import TargetServicer
from tests.gateway.fakes import FakeTarget, params
from tests.specdec.rpc.echo import serving
from tests.specdec.rpc.framed.other_process import server_process
from tests.until import until

SPEC = SessionSpec(session_id="s", token_ids=(1, 2, 3), prompt_len=3, params=params(max_tokens=8))
#: An echo server never answers it.
HANGING = replace(SPEC, session_id="hang")
#: A silent server is noticed after a second, and not after 40 as in service.
OFTEN = (("grpc.keepalive_time_ms", 500), ("grpc.http2.ping_timeout_ms", 500))


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/s"


@asynccontextmanager
async def connected(address, options=()):
    target = GrpcTarget(open_channel(address, options), address)
    try:
        yield target
    finally:
        await target.close()


async def open_session(target):
    session = await target.open(SPEC)
    assert session.first.token_ids
    await session.close()


@pytest.mark.parametrize("is_left", [True, False])
async def test_without_a_framed_socket_sessions_go_over_grpc(address, is_left):
    server = RpcServer(ServerSettings(socket=address))
    server.add(target_grpc.add_TargetServiceServicer_to_server, TargetServicer(FakeTarget()), "target")
    await server.start()
    try:
        async with connected(address) as target:
            await open_session(target)
            path = framed_path(address)
            os.unlink(path)
            if is_left:  # by a server that was killed
                with socket.socket(socket.AF_UNIX) as left:
                    left.bind(path)
            await open_session(target)
    finally:
        await server.stop()


async def test_framed_sessions_end_with_a_server_that_stops_without_closing_them(address):
    with server_process(address) as process:
        async with connected(address, OFTEN) as target, aclosing(target.health()) as states:
            while not await anext(states):
                pass
            opening = asyncio.create_task(target.open(HANGING))
            await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGSTOP)
            async with asyncio.timeout(30):
                with pytest.raises(Unavailable):
                    await anext(states)
                with pytest.raises(Unavailable):
                    await opening


async def test_framed_sessions_stay_with_a_server_that_drains(address):
    async with (
        serving(socket=address, drain_s=30.0) as (server, _),
        connected(address) as target,
        aclosing(target.health()) as states,
    ):
        while not await anext(states):
            pass
        opening = asyncio.create_task(target.open(HANGING))
        await until(lambda: server.num_active_calls == 1)
        draining = asyncio.create_task(server.drain())
        assert not await anext(states)
        assert not (await asyncio.wait((opening,), timeout=0.1))[0]
        opening.cancel()
        assert await draining
