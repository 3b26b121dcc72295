"""Admission of sessions: a bounded queue, fair between clients, in front of limited slots and memory."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdec.errors import Overloaded, TandemError

T = TypeVar("T")


class ClientFull(Overloaded):
    """A client holds as much as it may. Its sessions wait, those of others do not."""


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    reserve: Callable[[], T]
    client: str
    num_slots: int
    #: Order of arrival.
    number: int
    admitted: asyncio.Future[T]


class Admission(Generic[T]):
    """Admits sessions by calling their ``reserve`` function until it no longer raises :class:`Overloaded`.

    The next one is that of the client with the fewest open slots; of equal ones, of the client that has waited longest
    since it came or was last admitted. No session overtakes it: a large one at the head of the queue waits for memory,
    and the rest wait behind it.
    """

    def __init__(
        self,
        *,
        max_open: int,
        max_waiting: int,
        max_wait_s: float,
        undo: Callable[[T], None],
        describe: Callable[[], str],
    ) -> None:
        """``undo`` gives back what ``reserve`` took; ``describe`` returns the occupancy for error messages."""
        self._max_open = max_open
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._undo = undo
        self._describe = describe
        #: By client, in order of arrival.
        self._waiting: dict[str, deque[_Waiter[T]]] = {}
        self._open_of: Counter[str] = Counter()
        #: Arrivals and admissions so far, and that number at each client's last admission while it has sessions here.
        self._clock = 0
        self._last_admission: dict[str, int] = {}
        self.num_open = 0

    @property
    def num_waiting(self) -> int:
        """Sessions in the queue."""
        return sum(map(len, self._waiting.values()))

    async def admit(self, reserve: Callable[[], T], *, client: str = "", num_slots: int = 1) -> T:
        """Wait for slots and return what ``reserve`` returned. A cancelled call holds nothing.

        A full queue is shared: the last one of the client with most sessions in it makes room for another client's.

        Raises:
            Overloaded: the queue is full, or ``max_wait_s`` passed.
            TandemError: ``reserve`` raised it; Overloaded alone means "wait".
        """
        self._clock += 1
        admitted = asyncio.get_running_loop().create_future()
        waiter: _Waiter[T] = _Waiter(reserve, client, num_slots, self._clock, admitted)
        self._waiting.setdefault(client, deque()).append(waiter)
        self.admit_next()
        if not admitted.done() and self.num_waiting > self._max_waiting:
            self._displace(client)
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await waiter.admitted
        except BaseException as error:
            self._give_up(waiter)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"{self._describe()}; no slot came free within {self._max_wait_s:g} s; try later"
                ) from None
            raise

    def leave(self, client: str = "", num_slots: int = 1) -> None:
        """Count an admitted session as closed; its memory is free already. Admits the next ones."""
        self._count(client, -num_slots)
        self.admit_next()

    def admit_next(self) -> None:
        """Admit from the head of the queue as long as there is room."""
        full: set[str] = set()  # clients that hold as much as they may
        while clients := self._waiting.keys() - full:
            client = min(clients, key=self._priority)
            waiter = self._waiting[client][0]
            if not waiter.admitted.done():  # else its caller was cancelled and has not run since
                try:
                    got = self._try(waiter)
                except ClientFull:
                    full.add(client)
                    continue
                except TandemError as error:
                    waiter.admitted.set_exception(error)
                else:
                    if got is None:
                        return
                    waiter.admitted.set_result(got)
            self._remove(waiter)

    def refuse(self, error: TandemError) -> None:
        """Fail every waiting session with ``error``."""
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for waiter in waiters:
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(error)

    def _try(self, waiter: _Waiter[T]) -> T | None:
        if self.num_open + waiter.num_slots > self._max_open:
            return None
        try:
            got = waiter.reserve()
        except ClientFull:
            raise
        except Overloaded:
            return None
        self._count(waiter.client, waiter.num_slots)
        self._clock += 1
        self._last_admission[waiter.client] = self._clock
        return got

    def _priority(self, client: str) -> tuple[int, int]:
        """The lower, the earlier the client's next session is admitted."""
        return self._open_of[client], max(self._waiting[client][0].number, self._last_admission.get(client, 0))

    def _displace(self, client: str) -> None:
        """Refuse the last session of the client with most sessions in the queue; of equal ones, the newcomer's."""
        crowd = max(self._waiting, key=lambda each: (len(self._waiting[each]), each == client))
        waiter = self._waiting[crowd][-1]
        self._remove(waiter)
        if not waiter.admitted.done():
            waiter.admitted.set_exception(
                Overloaded(
                    f"{self._describe()}; the queue is full: {self.num_waiting} of {self._max_waiting} waiting; try"
                    " later"
                )
            )

    def _count(self, client: str, num_slots: int) -> None:
        self.num_open += num_slots
        self._open_of[client] += num_slots
        self._forget(client)

    def _remove(self, waiter: _Waiter[T]) -> None:
        waiters = self._waiting[waiter.client]
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.client]
            self._forget(waiter.client)

    def _forget(self, client: str) -> None:
        """Drop what is remembered of a client without sessions."""
        if not self._open_of[client]:
            del self._open_of[client]
            if client not in self._waiting:
                self._last_admission.pop(client, None)

    def _give_up(self, waiter: _Waiter[T]) -> None:
        if waiter in self._waiting.get(waiter.client, ()):
            self._remove(waiter)
            self.admit_next()  # sessions behind a large one may fit now
        elif not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            # Admitted in the same iteration of the event loop in which the caller was cancelled.
            self._undo(waiter.admitted.result())
            self.leave(waiter.client, waiter.num_slots)
