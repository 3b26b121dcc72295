"""Connections are used by one session after another."""

import grpc
import pytest

from specdec.rpc import channel_pool
from specdec.rpc.channel_pool import ChannelPool
from specdec.rpc.server import RpcServer
from specdec.settings import ServerSettings
from tests.until import until


@pytest.fixture
async def server():
    server = RpcServer(ServerSettings(port=0))
    await server.start()
    yield server
    await server.stop()


async def connected(pool, address):
    channel = await pool.take(address)
    await channel.channel_ready()
    return channel


async def test_a_connection_is_used_again_but_by_one_at_a_time(server):
    pool, address = ChannelPool(), server.address
    first, second = await connected(pool, address), await connected(pool, address)
    assert first is not second
    await pool.give_back(address, first)
    await pool.give_back(address, second)
    other = await pool.take("127.0.0.1:9")
    assert await pool.take(address) is second
    assert await pool.take(address) is first
    for channel in (first, second, other):
        await channel.close()


async def test_a_lost_connection_is_not_used_again(server):
    pool, address = ChannelPool(), server.address
    idle, used = await connected(pool, address), await connected(pool, address)
    await pool.give_back(address, idle)
    await server.stop()
    for channel in (idle, used):
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    await pool.give_back(address, used)
    fresh = await pool.take(address)
    assert fresh not in {idle, used}
    await fresh.close()
    await pool.close()


async def test_few_are_kept(server, monkeypatch):
    monkeypatch.setattr(channel_pool, "MAX_IDLE", 1)
    pool, address = ChannelPool(), server.address
    first, second = await connected(pool, address), await connected(pool, address)
    await pool.give_back(address, first)
    await pool.give_back(address, second)
    assert first.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await pool.close()
    assert second.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_none_is_kept_for_long(server, monkeypatch):
    monkeypatch.setattr(channel_pool, "MAX_IDLE_S", 0.05)
    pool, address = ChannelPool(), server.address
    first, second, used = [await connected(pool, address) for _ in range(3)]
    await pool.give_back(address, first)
    await pool.give_back(address, second)
    assert await pool.take(address) is second
    await until(lambda: first.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    await pool.give_back(address, second)
    await until(lambda: second.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    assert used.get_state() is grpc.ChannelConnectivity.READY
    await used.close()
    await pool.close()
