"""The bytes of requests that are being read: bounded, and shared by clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    def request(self, client: str) -> Iterator[Callable[[int], None]]:
        """One request of a client. Call the result with each number of bytes that comes; it raises Overloaded."""
        size = 0

        def add(count: int) -> None:
            nonlocal size
            self._check(client, count)
            size += count
            self._num_bytes += count
            self._bytes_of[client] += count

        self._requests_of[client] += 1
        try:
            yield add
        finally:
            self._num_bytes -= size
            self._bytes_of[client] -= size
            self._requests_of[client] -= 1
            if not self._requests_of[client]:
                del self._requests_of[client], self._bytes_of[client]

    def _check(self, client: str, count: int) -> None:
        free, held = self._max_bytes - self._num_bytes - count, self._bytes_of[client]
        if free < 0 or (self._requests_of[client] > 1 and held + count > free):
            raise Overloaded(
                f"the requests being read have {self._num_bytes} bytes, {held} of them of this client;"
                f" {self._max_bytes} are allowed (--max-buffered-bytes); try again later"
            )
