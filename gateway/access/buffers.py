"""The bytes of requests that are being read: bounded, and shared by clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specdec.errors import Overloaded


class RequestBuffers:
    """Counts bytes from when they are received until the request is read.

    Where a client has several requests here, they leave as much free as they hold: many large requests of one client
    keep nobody out.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._requests_of: Counter[str] = Counter()

    @contextmanager
    def request(self, client: str) -> Iterator[RequestBuffer]:
        """One request of a client."""
        buffer = RequestBuffer(self, client)
        self._requests_of[client] += 1
        try:
            yield buffer
        finally:
            if buffer.work is None:
                self._release(buffer)
            else:  # perhaps the client has left; what reads its bytes still holds them
                buffer.work.add_done_callback(lambda _: self._release(buffer))

    def _release(self, buffer: RequestBuffer) -> None:
        client = buffer.client
        self._count(client, -buffer.num_bytes)
        self._requests_of[client] -= 1
        if not self._requests_of[client]:
            del self._requests_of[client], self._bytes_of[client]

    def _count(self, client: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of[client] += num_bytes

    def add(self, buffer: RequestBuffer, count: int) -> None:
        """Count bytes of a request.

        Raises:
            Overloaded: they are too many.
        """
        self._check(buffer.client, count)
        buffer.num_bytes += count
        self._count(buffer.client, count)

    def _check(self, client: str, count: int) -> None:
        free, held = self._max_bytes - self._num_bytes - count, self._bytes_of[client]
        if free < 0 or (self._requests_of[client] > 1 and held + count > free):
            raise Overloaded(
                f"the requests being read have {self._num_bytes} bytes, {held} of them of this client;"
                f" {self._max_bytes} are allowed (--max-buffered-bytes); try again later"
            )


class RequestBuffer:
    """The bytes of one request."""

    def __init__(self, buffers: RequestBuffers, client: str) -> None:
        self._buffers = buffers
        self.client = client
        self.num_bytes = 0
        #: What holds the bytes until it is done, whether or not anybody waits for it.
        self.work: asyncio.Future[Any] | None = None

    def add(self, count: int) -> None:
        """Count bytes that have come.

        Raises:
            Overloaded: they are too many.
        """
        self._buffers.add(self, count)

    def keep_until(self, work: asyncio.Future[Any]) -> None:
        """Count the bytes until ``work`` is done."""
        self.work = work
