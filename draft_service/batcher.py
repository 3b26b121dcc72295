"""Joins the sessions' requests into batches for the drafter.

There is no timer: requests that arrive while a batch runs form the next batch. A lone session therefore waits for
nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final, Generic

from draft_service.draft_request import DraftRequest, InflightBatch
from draft_service.drafters.base import Draft, Drafter, DraftJob, S
from specdec.errors import InternalError, Unavailable
from specdec.process.tasks import call_each, failing

#: Sessions count as drafting for this long after a draft: longer than a round of a slow target.
_BUSY_NS: Final = 500_000_000


class DraftBatcher(Generic[S]):
    """Runs requests in order of arrival, as many together as ``max_rows`` (tokens ingested per batch) allows.

    Prompts are ingested in chunks. While other sessions draft, also between two of their drafts, a chunk is at most a
    quarter of ``max_rows``: a long prompt slows their drafting a little but never stops it.
    """

    def __init__(
        self,
        drafter: Drafter[S],
        max_rows: int,
        *,
        fail: Callable[[InternalError], None] = lambda _: None,
    ) -> None:
        """``fail`` is called once if an unexpected error ends the batcher itself: nothing is drafted from then on."""
        self._drafter = drafter
        self._max_rows = max_rows
        self._max_chunk = max(1, max_rows // 4)
        self._queue: list[DraftRequest[S]] = []
        #: The batch that the drafter runs.
        self.in_flight: InflightBatch | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._fail = fail
        self._failure: InternalError | None = None
        self._last_draft_ns = -_BUSY_NS
        #: Batches run since the start, and the nanoseconds they took.
        self.num_batches = 0
        self.busy_ns = 0

    @property
    def is_idle(self) -> bool:
        """Whether no batch runs and no request waits."""
        return self.in_flight is None and not self._queue

    def submit(self, request: DraftRequest[S]) -> None:
        """Queue a request.

        Raises:
            Unavailable: the batcher is closed.
            InternalError: an unexpected error has ended it.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise Unavailable("the draft service is shutting down")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="draft-batcher")
            self._task.add_done_callback(failing(self._end))
        self._queue.append(request)
        self._wake.set()

    async def close(self) -> None:
        """Let the running batch end and fail what is queued with :class:`Unavailable`. Idempotent."""
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while not self._closed:
            batch = self._next_batch()
            if not batch:
                await asyncio.sleep(0)  # send what was just drafted first
                batch = self._next_batch()
            if batch:
                await self._draft(batch)
            elif not self._closed:
                self._wake.clear()
                await self._wake.wait()
        for request in self._queue:
            request.resolve(Unavailable("the draft service is shutting down"))

    def _end(self, error: InternalError) -> None:
        """Fail what is queued, and what will be."""
        self._failure = error
        self._fail(error)
        call_each([partial(request.resolve, error) for request in self._queue])

    def _next_batch(self) -> list[tuple[DraftRequest[S], DraftJob[S]]]:
        """The next batch: drafts that are ready, then chunks of prompts in the rows that are left for them."""
        self._queue = [request for request in self._queue if not request.is_resolved]
        drafts: list[tuple[DraftRequest[S], int]] = []
        prompts: list[tuple[DraftRequest[S], int]] = []
        for request in self._queue:
            pending = request.state.num_pending
            ready = request.num_tokens > 0 and pending <= self._max_chunk
            (drafts if ready else prompts).append((request, pending))
        batch: list[tuple[DraftRequest[S], DraftJob[S]]] = []
        now_ns = time.perf_counter_ns()
        if drafts:
            self._last_draft_ns = now_ns
        prompt_rows = self._max_chunk if now_ns - self._last_draft_ns < _BUSY_NS else self._max_rows
        left = self._max_rows
        for request, pending in prompts:
            rows = min(pending, prompt_rows)
            if rows == 0 < pending:
                break
            prompt_rows, left = prompt_rows - rows, left - rows
            batch.append((request, request.job(rows)))
        for request, pending in drafts:
            rows = max(pending, 1)  # with nothing pending the last token is fed again
            if rows > left and batch:
                break
            left -= rows
            batch.append((request, request.job(pending)))
        return batch

    async def _draft(self, batch: list[tuple[DraftRequest[S], DraftJob[S]]]) -> None:
        started_ns = time.perf_counter_ns()
        self.in_flight = in_flight = InflightBatch()
        for request, _ in batch:
            request.batch = in_flight
        outcome: list[Draft] | Exception
        try:
            outcome = await self._drafter.draft([job for _, job in batch])
        except Exception as error:
            outcome = error
        self._finish(batch, in_flight, started_ns, outcome)

    def _finish(
        self,
        batch: list[tuple[DraftRequest[S], DraftJob[S]]],
        in_flight: InflightBatch,
        started_ns: int,
        outcome: list[Draft] | Exception,
    ) -> None:
        """A batch has run: deliver its drafts."""
        spent_ns = time.perf_counter_ns() - started_ns
        self.num_batches += 1
        self.busy_ns += spent_ns
        self.in_flight = None
        for request, _ in batch:
            request.batch = None
        with ExitStack() as finished:
            for callback in reversed(in_flight.on_finished):
                finished.callback(callback)
            for request, _ in batch:
                request.queue_ns = request.queue_ns or started_ns - request.submitted_ns
                request.draft_ns += spent_ns
            for index, (request, job) in enumerate(batch):
                if isinstance(outcome, Exception):
                    request.resolve(outcome)
                elif job.num_tokens == request.num_tokens and not request.state.num_pending:
                    request.resolve(outcome[index])
