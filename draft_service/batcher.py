"""Joins the waiting sessions' wishes into batches for the drafter.

There is no timer: while a batch runs, new wishes gather, and together they are the next batch. A lone session
therefore waits for nobody, and an idle batcher sleeps, or drafts ahead where there is something to guess.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, Protocol

from draft_service.drafters.base import Draft, Drafter, DraftJob, S, Stop
from specdec.errors import Unavailable
from specdec.tree_shape import TreeShape

logger = logging.getLogger(__name__)

#: Sessions are taken to be drafting for this long after a draft: longer than a round of a slow target.
_BUSY_NS: Final = 500_000_000


class DraftRequest(Generic[S]):
    """One session's request, from submission to its draft."""

    __slots__ = (
        "assumed",
        "assumes_next",
        "deliver",
        "draft_ns",
        "flight",
        "is_settled",
        "likelihood",
        "num_guesses",
        "num_tokens",
        "queue_ns",
        "state",
        "stop",
        "submitted_ns",
        "tree",
    )

    def __init__(
        self,
        state: S,
        num_tokens: int,
        deliver: Callable[[Draft | Exception], None],
        *,
        num_guesses: int = 0,
        assumed: tuple[int, ...] = (),
        assumes_next: bool = False,
        likelihood: float = 1.0,
        tree: TreeShape | None = None,
    ) -> None:
        self.state = state
        #: Tokens to draft; 0 only takes in what is pending.
        self.num_tokens = num_tokens
        #: Called once, unless the wish is withdrawn; its state is not in the drafter's hands any more then.
        self.deliver = deliver
        self.num_guesses = num_guesses
        self.assumed = assumed
        self.assumes_next = assumes_next
        #: Probability that the draft will be of use; 1 for one that is waited for.
        self.likelihood = likelihood
        #: What kind of tree to draft; None: a chain.
        self.tree = tree
        self.stop = Stop()
        self.is_settled = False
        #: The batch it stands in, while that is in the drafter's hands.
        self.flight: InflightBatch | None = None
        self.submitted_ns = time.perf_counter_ns()
        self.queue_ns = 0
        self.draft_ns = 0

    def job(self, num_rows: int) -> DraftJob[S]:
        """The job for the drafter: take in ``num_rows`` pending tokens, and draft if these are all."""
        num_tokens = self.num_tokens if self.assumed or num_rows == self.state.num_pending else 0
        return DraftJob(
            self.state, num_rows, num_tokens, self.num_guesses, self.assumed, self.assumes_next, self.stop, self.tree
        )

    def settle(self, outcome: Draft | Exception) -> None:
        """Deliver the outcome, once."""
        if not self.is_settled:
            self.is_settled = True
            self.deliver(outcome)

    def withdraw(self) -> None:
        """Nobody waits for the draft any more: it is not begun, or ends soon, and is not delivered."""
        self.is_settled = True
        self.likelihood = 0.0
        self.stop.please()


class InflightBatch:
    """A batch in the drafter's hands."""

    __slots__ = ("is_ahead", "num_waiting", "on_landed", "wishes")

    def __init__(self, wishes: Sequence[DraftRequest[Any]]) -> None:
        self.wishes = wishes
        #: All of it is drafted ahead: no verdict has asked for it yet.
        self.is_ahead = all(wish.assumed for wish in wishes)
        #: Sessions of the batch that cannot wish before it has landed.
        self.num_waiting = 0
        #: Called once the outcomes are delivered.
        self.on_landed: list[Callable[[], None]] = []

    def make_way(self, num_waiting: int) -> None:
        """Stop the guesses of a batch drafted ahead where more wait for its end than are likely to profit by it.

        Guesses that a verdict has confirmed go on: they are waited for, too.
        """
        if self.is_ahead and num_waiting > sum(wish.likelihood for wish in self.wishes if not wish.stop.is_raised):
            for wish in self.wishes:
                if wish.likelihood < 1.0:
                    wish.stop.please()


class IdleWork(Protocol):
    """What there is to do while no session waits."""

    def take(self) -> list[DraftRequest[Any]]:
        """Wishes for one batch, to be begun at once; empty where nothing is worth it."""
        ...

    def landed(self, flight: InflightBatch, num_steps: int, spent_ns: int) -> None:
        """A batch, of this or any other work, has drafted this many tokens in a row (0: it failed, or drafted nothing)
        and taken this long.
        """
        ...


class Batcher(Generic[S]):
    """Runs wishes in order of arrival, as many together as ``max_rows`` (tokens taken in per batch) allows.

    Prompts are taken in by chunks. While other sessions draft, also between two of their drafts, a chunk is at most a
    quarter of ``max_rows``: a long prompt slows their drafting a little but never stops it.
    """

    def __init__(
        self,
        drafter: Drafter[S],
        max_rows: int,
        idle_work: IdleWork | None = None,
        num_sessions: Callable[[], int] | None = None,
    ) -> None:
        """``num_sessions`` tells how many sessions may wish: when all do, there is nobody to wait for."""
        self._drafter = drafter
        self._max_rows = max_rows
        self._num_sessions = num_sessions
        #: Once in a turn of the loop: a caller that never has to wait must not keep the others from running.
        self._may_draft_now = True
        self._max_chunk = max(1, max_rows // 4)
        self._idle_work = idle_work
        self._queue: list[DraftRequest[S]] = []
        self._flight: InflightBatch | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._last_draft_ns = -_BUSY_NS
        #: Batches run since the start, and the nanoseconds they took.
        self.num_batches = 0
        self.busy_ns = 0

    def submit(self, wish: DraftRequest[S]) -> None:
        """Queue a wish.

        Raises:
            Unavailable: the batcher is closed.
        """
        if self._closed:
            raise Unavailable("the draft service is shutting down")
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="draft-batcher")
        self._queue.append(wish)
        self._wake.set()
        if self._flight is not None:
            self._flight.make_way(len(self._queue) + self._flight.num_waiting)
        elif self._num_sessions is not None and self._may_draft_now and len(self._queue) >= self._num_sessions():
            self._draft_now()

    def wake(self) -> None:
        """There may be idle work."""
        self._wake.set()

    def expect(self, flight: InflightBatch) -> None:
        """A session that stands in a running batch will wish as soon as that has landed."""
        flight.num_waiting += 1
        flight.make_way(len(self._queue) + flight.num_waiting)

    async def close(self) -> None:
        """Let the running batch end and fail what is queued with :class:`Unavailable`. Idempotent."""
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        while not self._closed:
            batch = self._take()
            if not batch and self._idle_work is not None:
                await asyncio.sleep(0)  # what was just drafted is sent first
                batch = self._take() or [(wish, wish.job(0)) for wish in self._idle_work.take()]
            if batch:
                await self._draft(batch)
            elif not self._closed:
                self._wake.clear()
                await self._wake.wait()
        for wish in self._queue:
            wish.settle(Unavailable("the draft service is shutting down"))

    def _take(self) -> list[tuple[DraftRequest[S], DraftJob[S]]]:
        """The next batch: drafts that are ready, then chunks of prompts in the room that is left for them."""
        self._queue = [wish for wish in self._queue if not wish.is_settled]
        drafts: list[tuple[DraftRequest[S], int]] = []
        prompts: list[tuple[DraftRequest[S], int]] = []
        for wish in self._queue:
            pending = wish.state.num_pending
            ready = wish.num_tokens > 0 and pending <= self._max_chunk
            (drafts if ready else prompts).append((wish, pending))
        batch: list[tuple[DraftRequest[S], DraftJob[S]]] = []
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
            batch.append((wish, wish.job(rows)))
        for wish, pending in drafts:
            rows = max(pending, 1)  # with nothing pending the last token is fed again
            if rows > left and batch:
                break
            left -= rows
            batch.append((wish, wish.job(pending)))
        return batch

    async def _draft(self, batch: list[tuple[DraftRequest[S], DraftJob[S]]]) -> None:
        started_ns = time.perf_counter_ns()
        self._flight = flight = InflightBatch([wish for wish, _ in batch])
        for wish, _ in batch:
            wish.flight = flight
        outcome: list[Draft] | Exception
        try:
            outcome = await self._drafter.draft([job for _, job in batch])
        except Exception as error:
            outcome = error
            if flight.is_ahead:  # nobody waits for it, so nobody else would tell
                logger.exception("drafting ahead failed; its sessions go on without")
        self._land(batch, flight, started_ns, outcome)

    def _draft_now(self) -> None:
        """Run all that waits here and now, if that is short."""
        started_ns = time.perf_counter_ns()
        batch = self._take()
        outcome: list[Draft] | Exception | None
        try:
            outcome = self._drafter.draft_now([job for _, job in batch]) if batch else None
        except Exception as error:
            outcome = error
        if outcome is not None:
            self._may_draft_now = False
            asyncio.get_running_loop().call_soon(self._next_turn)
            self._land(batch, InflightBatch([wish for wish, _ in batch]), started_ns, outcome)

    def _next_turn(self) -> None:
        self._may_draft_now = True

    def _land(
        self,
        batch: list[tuple[DraftRequest[S], DraftJob[S]]],
        flight: InflightBatch,
        started_ns: int,
        outcome: list[Draft] | Exception,
    ) -> None:
        """A batch has run: deliver what it brought."""
        spent_ns = time.perf_counter_ns() - started_ns
        self.num_batches += 1
        self.busy_ns += spent_ns
        self._flight = None
        if self._idle_work is not None:
            drafts = [] if isinstance(outcome, Exception) else outcome
            num_steps = max((len(draft.token_ids) + bool(draft.next_guesses) for draft in drafts), default=0)
            self._idle_work.landed(flight, num_steps, spent_ns)
        for wish, _ in batch:
            wish.flight = None
            wish.queue_ns = wish.queue_ns or started_ns - wish.submitted_ns
            wish.draft_ns += spent_ns
        for index, (wish, job) in enumerate(batch):
            if isinstance(outcome, Exception):
                wish.settle(outcome)
            elif job.num_tokens == wish.num_tokens and not (wish.state.num_pending and not wish.assumed):
                wish.settle(outcome[index])
        for callback in flight.on_landed:
            callback()
