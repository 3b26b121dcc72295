"""A process that makes attacks, so that their work slows down nothing that is measured beside them."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

#: Seconds for an answer of the process: an attack of 60 MB builds its bytes first.
ANSWER_TIMEOUT_S: Final = 90.0


class Attacker:
    """Runs ``work(server, connection)`` in a process."""

    def __init__(self, work: Callable[[Any, Connection], None], server: object) -> None:
        """``work`` and ``server`` must be picklable."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(work, server, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, order: object) -> None:
        """Send an order to the work's connection."""
        with suppress(BrokenPipeError):  # the process has ended; the answer says why
            self._connection.send(order)

    async def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """What the work sends next.

        Raises:
            RuntimeError: the work failed; with its traceback, or without one where the process was killed.
            TimeoutError: nothing came in time.
        """
        if not await asyncio.to_thread(self._connection.poll, timeout_s):
            raise TimeoutError(f"the attacker did not answer within {timeout_s:g} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join(timeout_s)
            raise RuntimeError(f"the attacker ended with status {self._process.exitcode}") from None
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _work(work: Callable[[Any, Connection], None], server: object, connection: Connection) -> None:
    try:
        work(server, connection)
    except Exception as error:
        connection.send(RuntimeError("".join(traceback.format_exception(error))))
