"""Whether an engine answers: what waits for one that does not is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from specdec.errors import Unavailable


class Liveness:
    """The calls that wait for one engine. A connection stays open while its process hangs, so they would wait on."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._why = ""

    @asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None, None]:
        """Wait for the engine, until :meth:`lose`.

        Raises:
            Unavailable: the engine was lost.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes.add(scope)
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError:
            raise Unavailable(self._why) from None

    def lose(self, why: str) -> None:
        """End every wait."""
        self._why = why
        now_s = asyncio.get_running_loop().time()
        for scope in tuple(self._scopes):
            scope.reschedule(now_s)
