"""Waiting for what no event tells."""

import asyncio
import inspect


async def until(condition, timeout_s=30.0):
    """Wait until ``condition()``, or what it returns to await, is true."""
    async with asyncio.timeout(timeout_s):
        while not (await found if inspect.isawaitable(found := condition()) else found):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
