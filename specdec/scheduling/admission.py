"""Admission of sessions: a bounded queue, first come first served, in front of limited places and memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdec.errors import Overloaded, TandemError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter(Generic[T]):
    reserve: Callable[[], T]
    admitted: asyncio.Future[T]


class Admission(Generic[T]):
    """Admits sessions by calling their ``reserve`` function until it no longer raises :class:`Overloaded`.

    No session overtakes another: a large one at the head of the queue waits for memory, and the rest wait behind it.
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
        self._waiting: deque[_Waiter[T]] = deque()
        self.num_open = 0

    @property
    def num_waiting(self) -> int:
        """Sessions in the queue."""
        return len(self._waiting)

    async def admit(self, reserve: Callable[[], T]) -> T:
        """Wait for a place and return what ``reserve`` returned. A cancelled call holds nothing.

        Raises:
            Overloaded: the queue is full, or ``max_wait_s`` passed.
            TandemError: ``reserve`` raised it; Overloaded alone means "wait".
        """
        if not self._waiting and (got := self._try(reserve)) is not None:
            return got
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(
                f"{self._describe()}; the queue is full: {len(self._waiting)} of {self._max_waiting} waiting; try later"
            )
        waiter: _Waiter[T] = _Waiter(reserve, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await waiter.admitted
        except BaseException as error:
            self._give_up(waiter)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"{self._describe()}; no place came free within {self._max_wait_s:g} s; try later"
                ) from None
            raise

    def leave(self) -> None:
        """Count an admitted session as closed; its memory is free already. Admits the next ones."""
        self.num_open -= 1
        self.admit_next()

    def admit_next(self) -> None:
        """Admit from the head of the queue as long as there is room."""
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.admitted.done():  # else its caller was cancelled and has not run since
                try:
                    got = self._try(waiter.reserve)
                except TandemError as error:
                    waiter.admitted.set_exception(error)
                else:
                    if got is None:
                        return
                    waiter.admitted.set_result(got)
            self._waiting.popleft()

    def refuse(self, error: TandemError) -> None:
        """Fail every waiting session with ``error``."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def _try(self, reserve: Callable[[], T]) -> T | None:
        if self.num_open >= self._max_open:
            return None
        try:
            got = reserve()
        except Overloaded:
            return None
        self.num_open += 1
        return got

    def _give_up(self, waiter: _Waiter[T]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.admit_next()  # sessions behind a large one may fit now
        elif not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            # Admitted in the same iteration of the event loop in which the caller was cancelled.
            self._undo(waiter.admitted.result())
            self.leave()
