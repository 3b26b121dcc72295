"""Connections that the next session uses again."""

from __future__ import annotations

from collections import deque
from typing import Final

import grpc
import grpc.aio

from specdec.rpc.channel import open_channel

#: Connections that wait for a session, of all servers.
MAX_IDLE: Final = 32


class ChannelPool:
    """Channels without certificates, each for one session at a time: a packet that one waits for holds up no other.

    Far away a new connection takes two trips, one that was used before none: at 50 ms the first round came after 3
    steps of 28 ms in place of 6.
    """

    def __init__(self) -> None:
        self._idle: deque[tuple[str, grpc.aio.Channel]] = deque()

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
            self._idle.append((address, channel))
            if len(self._idle) <= MAX_IDLE:
                return
            _, channel = self._idle.popleft()
        await channel.close()

    async def close(self) -> None:
        """Close those that wait."""
        while self._idle:
            await self._idle.popleft()[1].close()
