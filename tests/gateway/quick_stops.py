"""Gateways of this process that start and stop at once."""

import asyncio
import contextlib
from unittest import mock


class _QuickAsyncio:
    """``asyncio`` for uvicorn, which looks every 100 ms whether it should stop, and then waits for as long."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    async def sleep(self, delay_s):
        await asyncio.sleep(min(delay_s, 0.005))


@contextlib.contextmanager
def quick_stops():
    """Uvicorn and the gateway look at the clock 20 times as often as elsewhere."""
    with (
        mock.patch("uvicorn.server.asyncio", _QuickAsyncio()),
        mock.patch("gateway.app.CHECK_INTERVAL_S", 0.005),
    ):
        yield
