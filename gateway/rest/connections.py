"""HTTP connections: how many there are, and how long their clients may keep the gateway waiting."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import sys
import termios
import time
from collections import Counter, OrderedDict
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.rest.errors import raw_response
from specdec.settings import ConnectionSettings

logger = logging.getLogger(__name__)

#: Seconds between two checks of all connections, at most.
CHECK_INTERVAL_S: Final = 1.0


class Wait(Enum):
    """What the client of a connection has still to send."""

    REQUEST = "a request"
    NEXT_REQUEST = "another request"
    HEADERS = "the headers"
    BODY = "the body"


class Connections:
    """All HTTP connections of a gateway, and those whose client keeps it waiting, the longest first."""

    def __init__(self, settings: ConnectionSettings, *, max_connections: int | None = None) -> None:
        """``max_connections``: fewer than the settings', where the system allows no more."""
        self._max_connections = max_connections or settings.max_connections
        self._max_of_client = settings.max_client_connections
        self._write_timeout_s = settings.write_timeout_s
        self._timeouts_s = {
            Wait.REQUEST: settings.header_timeout_s,
            Wait.NEXT_REQUEST: settings.keep_alive_s,
            Wait.HEADERS: settings.header_timeout_s,
            Wait.BODY: settings.body_timeout_s,
        }
        self._open: dict[GuardedHttp, str] = {}
        self._num_of: Counter[str] = Counter()
        self._waiting: OrderedDict[GuardedHttp, None] = OrderedDict()
        self._waiting_of: dict[str, OrderedDict[GuardedHttp, None]] = {}
        self._num_dropped = 0
        self._check: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: GuardedHttp, client: str) -> None:
        """A connection was made. Where there are too many, the one that has kept us waiting longest is closed; where
        all are being served, the new one.
        """
        self._open[connection] = client
        self._num_of[client] += 1
        if self._num_of[client] > self._max_of_client:
            self._drop(self._waiting_of.get(client), connection)
        elif len(self._open) > self._max_connections:
            self._drop(self._waiting, connection)
        self._schedule_check()

    def discard(self, connection: GuardedHttp) -> None:
        """A connection is closed."""
        client = self._open.pop(connection, None)
        if client is not None:
            self._num_of[client] -= 1
            if not self._num_of[client]:
                del self._num_of[client]
            self._forget_wait(connection, client)

    def set_waiting(self, connection: GuardedHttp, *, is_waiting: bool) -> None:
        """A client begins to keep us waiting now, or does so no longer."""
        client = self._open.get(connection)
        if client is None:
            return
        self._forget_wait(connection, client)
        if is_waiting:
            self._waiting[connection] = None
            self._waiting_of.setdefault(client, OrderedDict())[connection] = None

    def _forget_wait(self, connection: GuardedHttp, client: str) -> None:
        self._waiting.pop(connection, None)
        waiting = self._waiting_of.get(client)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting_of[client]

    def _drop(self, waiting: OrderedDict[GuardedHttp, None] | None, newest: GuardedHttp) -> None:
        self._num_dropped += 1
        victim = next(iter(waiting)) if waiting else newest
        self.discard(victim)
        victim.abort()

    def _schedule_check(self) -> None:
        if self._check is None:
            shortest_s = min(self._write_timeout_s, *self._timeouts_s.values())
            delay_s = min(CHECK_INTERVAL_S, shortest_s / 4)
            self._check = asyncio.get_running_loop().call_later(delay_s, self._end_late)

    def _end_late(self) -> None:
        """Close the connections whose client is too late."""
        self._check = None
        if self._num_dropped:
            logger.warning("closed %d connections: too many are open (--max-connections)", self._num_dropped)
            self._num_dropped = 0
        now_s = time.monotonic()
        for connection in list(self._open):
            connection.note_reading(now_s)
            if (since_s := connection.writing_since_s) is not None and now_s - since_s > self._write_timeout_s:
                connection.abort()
            elif connection.is_closing:
                connection.writing_since_s = since_s or now_s  # the client has to read the last of it
            elif connection.waits_for is not None:
                timeout_s = self._timeouts_s[connection.waits_for]
                if now_s - connection.waiting_since_s > timeout_s:
                    connection.end_late(timeout_s)
        if self._open:
            self._schedule_check()


class GuardedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which by itself waits for ever, with deadlines for its client."""

    #: Those of the gateway; set by :func:`guarded_http`.
    all_connections: Connections

    #: What the client has still to send, and since when; None while the gateway works.
    waits_for: Wait | None = None
    waiting_since_s = 0.0
    #: Since when the client has read nothing of what is to be sent; None while nothing waits for it.
    writing_since_s: float | None = None
    #: Bytes it had not read at the last check.
    _num_unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection."""
        super().connection_made(transport)
        self.all_connections.add(self, self.client[0] if self.client else "")
        self._wait_for(Wait.REQUEST)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no longer."""
        self.all_connections.discard(self)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if not self._is_working:
            self._wait_for(Wait.HEADERS)

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        was_working = self._is_working
        super().on_headers_complete()
        if not was_working:
            self._wait_for(Wait.BODY)

    def on_message_complete(self) -> None:
        """The whole request is there."""
        super().on_message_complete()
        if self.waits_for is Wait.BODY:
            self._wait_for(None)

    def on_response_complete(self) -> None:
        """The answer is sent. Another request may be there already."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self._wait_for(Wait.NEXT_REQUEST)
        else:
            self._wait_for(Wait.BODY if self.cycle.more_body else None)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self.writing_since_s = time.monotonic()

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self.writing_since_s = None

    def note_reading(self, now_s: float) -> None:
        """Restart the time for writing where the client has read something since the last check, however little."""
        if self.writing_since_s is None:
            return
        before, self._num_unread = self._num_unread, self.transport.get_write_buffer_size() + self._num_in_kernel()
        if self._num_unread < before:
            self.writing_since_s = now_s

    def _num_in_kernel(self) -> int:
        """Bytes in the socket's buffer, whose room is reported only when much of it is free. Linux tells them."""
        handle = self.transport.get_extra_info("socket").fileno()
        if sys.platform != "linux" or handle < 0:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(handle, termios.TIOCOUTQ, bytes(4)))[0])

    def abort(self) -> None:
        """Close the connection now; what is not sent yet is lost, and the request is cancelled."""
        self.transport.abort()

    def end_late(self, timeout_s: float) -> None:
        """Close the connection: what it waits for has not come within so many seconds."""
        if self.waits_for in (Wait.HEADERS, Wait.BODY) and not (self.cycle and self.cycle.response_started):
            text = f"{self.waits_for.value} did not come within {timeout_s:g} s; send them faster"
            self.transport.write(raw_response(HTTPStatus.REQUEST_TIMEOUT, text, "timeout_error"))
        self.waits_for = None
        self.transport.close()

    @property
    def is_closing(self) -> bool:
        """Whether nothing more is read or written but what waits to be sent."""
        return self.transport.is_closing()

    @property
    def _is_working(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for(self, what: Wait | None) -> None:
        self.waits_for, self.waiting_since_s = what, time.monotonic()
        self.all_connections.set_waiting(self, is_waiting=what is not None)


def guarded_http(base: type[HttpToolsProtocol], connections: Connections) -> type[HttpToolsProtocol]:
    """A protocol with deadlines around another one."""
    members: dict[str, Any] = {"all_connections": connections}
    return type("GuardedHttp", (GuardedHttp, base), members)
