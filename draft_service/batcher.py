"""Joins the waiting sessions' wishes into batches for the drafter.

There is no timer: while a batch runs, new wishes gather, and together they are the next batch. A lone session
therefore waits for nobody, and an idle batcher sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Generic

from draft_service.drafter import Draft, Drafter, DraftJob, S
from specdec.errors import Unavailable

#: Sessions are taken to be drafting for this long after a draft: longer than a round of a slow target.
_BUSY_NS: Final = 500_000_000


class Wish(Generic[S]):
    """One session's request, from submission to its draft."""

    __slots__ = ("done", "draft_ns", "num_tokens", "on_idle", "queue_ns", "running", "state", "submitted_ns")

    def __init__(self, state: S, num_tokens: int, done: asyncio.Future[Draft]) -> None:
        self.state = state
        #: Tokens to draft; 0 only takes in what is pending.
        self.num_tokens = num_tokens
        #: Cancelling it (or cancelling who awaits it) withdraws the wish.
        self.done = done
        #: Whether its state is in the drafter's hands right now.
        self.running = False
        #: Called when it is not any more.
        self.on_idle: list[Callable[[], None]] = []
        self.submitted_ns = time.perf_counter_ns()
        self.queue_ns = 0
        self.draft_ns = 0


class Batcher(Generic[S]):
    """Runs wishes in order of arrival, as many together as ``max_rows`` (tokens taken in per batch) allows.

    Prompts are taken in by chunks. While other sessions draft, also between two of their drafts, a chunk is at most a
    quarter of ``max_rows``: a long prompt slows their drafting a little but never stops it.
    """

    def __init__(self, drafter: Drafter[S], max_rows: int) -> None:
        self._drafter = drafter
        self._max_rows = max_rows
        self._max_chunk = max(1, max_rows // 4)
        self._queue: list[Wish[S]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._last_draft_ns = -_BUSY_NS
        #: Batches run since the start, and the nanoseconds they took.
        self.num_batches = 0
        self.busy_ns = 0

    def submit(self, state: S, num_tokens: int) -> Wish[S]:
        """Queue a wish; await its ``done``.

        Raises:
            Unavailable: the batcher is closed.
        """
        if self._closed:
            raise Unavailable("the draft service is shutting down")
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run(), name="draft-batcher")
        wish = Wish(state, num_tokens, loop.create_future())
        self._queue.append(wish)
        self._wake.set()
        return wish

    async def close(self) -> None:
        """Let the running batch end and fail what is queued with :class:`Unavailable`. Idempotent."""
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while not self._closed:
            batch = self._take()
            if batch:
                await self._draft(batch)
            else:
                self._wake.clear()
                await self._wake.wait()
        for wish in self._queue:
            _settle(wish, Unavailable("the draft service is shutting down"))

    def _take(self) -> list[tuple[Wish[S], DraftJob[S]]]:
        """The next batch: drafts that are ready, then chunks of prompts in the room that is left for them."""
        self._queue = [wish for wish in self._queue if not wish.done.done()]
        drafts: list[tuple[Wish[S], int]] = []
        prompts: list[tuple[Wish[S], int]] = []
        for wish in self._queue:
            pending = wish.state.num_pending
            ready = wish.num_tokens > 0 and pending <= self._max_chunk
            (drafts if ready else prompts).append((wish, pending))
        batch: list[tuple[Wish[S], DraftJob[S]]] = []
        now_ns = time.perf_counter_ns()
        if drafts:
            self._last_draft_ns = now_ns
        room = self._max_chunk if now_ns - self._last_draft_ns < _BUSY_NS else self._max_rows
        left = self._max_rows
        for wish, pending in prompts:
            rows = min(pending, room)
            if rows == 0 < pending:
                break
            room, left = room - rows, left - rows
            batch.append((wish, DraftJob(wish.state, rows, wish.num_tokens if rows == pending else 0)))
        for wish, pending in drafts:
            rows = max(pending, 1)  # with nothing pending the last token is fed again
            if rows > left and batch:
                break
            left -= rows
            batch.append((wish, DraftJob(wish.state, pending, wish.num_tokens)))
        return batch

    async def _draft(self, batch: list[tuple[Wish[S], DraftJob[S]]]) -> None:
        started_ns = time.perf_counter_ns()
        for wish, _ in batch:
            wish.running = True
            wish.queue_ns = wish.queue_ns or started_ns - wish.submitted_ns
        outcome: list[Draft] | Exception
        try:
            outcome = await self._drafter.draft([job for _, job in batch])
        except Exception as error:
            outcome = error
        spent_ns = time.perf_counter_ns() - started_ns
        self.num_batches += 1
        self.busy_ns += spent_ns
        for index, (wish, job) in enumerate(batch):
            wish.running = False
            wish.draft_ns += spent_ns
            if isinstance(outcome, Exception):
                _settle(wish, outcome)
            elif job.num_tokens == wish.num_tokens and not wish.state.num_pending:
                _settle(wish, outcome[index])
            for callback in wish.on_idle:
                callback()
            wish.on_idle.clear()


def _settle(wish: Wish[Any], outcome: Draft | Exception) -> None:
    if wish.done.done():
        return
    if isinstance(outcome, Exception):
        wish.done.set_exception(outcome)
    else:
        wish.done.set_result(outcome)
