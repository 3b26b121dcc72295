"""Connections that the next session uses again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

import grpc
import grpc.aio

from specdec.rpc.channel import open_channel

#: Connections that wait for a session, of all servers, and for how long, in seconds.
MAX_IDLE: Final = 32
MAX_IDLE_S: Final = 300.0


class ChannelPool:
    """Channels without certificates, each for one session at a time: a packet that one waits for holds up no other.

    Far away a new connection takes two trips, one that was used before none: at 50 ms the first round came after 3
    steps of 28 ms in place of 6.
    """

    def __init__(self) -> None:
        #: Address, channel, and until when it is kept; in the order in which they were given back.
        self._idle: deque[tuple[str, grpc.aio.Channel, float]] = deque()
        self._closing_old: asyncio.Task[None] | None = None

    async def take(self, address: str) -> grpc.aio.Channel:
        """A channel to ``host:port``: the one that was given back last, if its connection still stands."""
        for entry in reversed([entry for entry in self._idle if entry[0] == address]):
            self._idle.remove(entry)
            if entry[1].get_state() is grpc.ChannelConnectivity.READY:
                return entry[1]
            await entry[1].close()
        return open_channel(address)

    async def give_back(self, address: str, channel: grpc.aio.Channel) -> None:
        """Its session is over. Where the connection is lost, or there are too many, one is closed."""
        if channel.get_state() is grpc.ChannelConnectivity.READY:
            self._idle.append((address, channel, time.monotonic() + MAX_IDLE_S))
            if self._closing_old is None or self._closing_old.done():
                self._closing_old = asyncio.create_task(self._close_old(), name="idle-channels")
            if len(self._idle) <= MAX_IDLE:
                return
            channel = self._idle.popleft()[1]
        await channel.close()

    async def close(self) -> None:
        """Close those that wait."""
        if self._closing_old is not None:
            self._closing_old.cancel()
        while self._idle:
            await self._idle.popleft()[1].close()

    async def _close_old(self) -> None:
        while self._idle:
            rest_s = self._idle[0][2] - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self._idle.popleft()[1].close()
