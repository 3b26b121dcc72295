"""Continuous batching: every step is one forward pass over all that is ready at its start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from specdec.errors import InternalError, TandemError
from target_service.scheduler.composition import prefill_room, share_prefill, take_rounds
from target_service.scheduler.draft_budget import Budget
from target_service.scheduler.round_coalescer import RoundCoalescer
from target_service.session import Session
from target_service.step import ScheduledSequence, StepResult

logger = logging.getLogger(__name__)

#: A step is run on the event loop if it should take no longer than this: the two hand-overs to the device thread and
#: back take a tenth of a millisecond. Nothing else waits for the loop then but a session that opens.
MAX_NS_NOW: Final = 4_000_000


class Batcher:
    """Collects sessions with something to feed and runs steps while there are any.

    A step starts as soon as something is ready and the device is free, and what becomes ready meanwhile is in the next
    one, except where rounds are about to come in whose company is worth the wait. An idle batcher sleeps.
    """

    def __init__(
        self,
        run: Callable[[Sequence[ScheduledSequence]], Awaitable[StepResult]],
        max_num_batched_tokens: int,
        budget: Budget | None = None,
        run_now: Callable[[Sequence[ScheduledSequence]], StepResult] | None = None,
    ) -> None:
        """``run`` feeds the parts on the device thread, ``run_now`` on the calling one, where that may be done while no
        other step runs; ``max_num_batched_tokens`` is the rows of one step; ``budget`` cuts drafted tokens that are not
        worth theirs.
        """
        self._run = run
        self._run_now = run_now
        self._is_running = False
        #: Rows and duration of the latest step of rounds alone.
        self._latest = (1, MAX_NS_NOW)
        self._max_rows = max_num_batched_tokens
        self._budget = budget or Budget()
        self._gathering = RoundCoalescer()
        self._ended_ns: int | None = None
        #: In order of arrival; a dict because a session may call twice.
        self._ready: dict[Session, None] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._task = asyncio.get_running_loop().create_task(self._loop(), name="target-batcher")
        #: Steps run since the start.
        self.num_steps = 0

    def add(self, session: Session) -> None:
        """The session has something to feed."""
        self._ready[session] = None
        self._gathering.came(session, time.perf_counter_ns())
        self._wake.set()

    def forget(self, session: Session) -> None:
        """The session is closed."""
        self._gathering.forget(session)

    def run_now(self, num_sessions: int) -> bool:
        """Run the rounds that are ready here and now, where these are all that ``num_sessions`` sessions can have, so
        that nobody is kept waiting, and they are short; whether that was so.
        """
        if (
            self._run_now is None
            or self._is_running
            or self._closed
            or len(self._ready) != num_sessions
            or not all(session.num_draft_tokens for session in self._ready)
        ):
            return False
        rows, spent_ns = self._latest
        num_rows = sum(session.num_round_rows for session in self._ready)
        if num_rows > self._max_rows or spent_ns * max(1.0, num_rows / rows) >= MAX_NS_NOW:
            return False
        taken = self._take()
        with self._settling(taken) as settle:
            settle(self._run_now([part for _, part in taken]))
        return True

    async def close(self) -> None:
        """Let the running step end and stop. Idempotent."""
        self._closed = True
        self._wake.set()
        await asyncio.wait((self._task,))

    async def _loop(self) -> None:
        while not self._closed:
            await self._gather()
            taken = self._take()
            if taken:
                await self._step(taken)
                if any(session not in self._ready for session, _ in taken):
                    # Who got its answer now may have the next round at hand; let it into the next step.
                    await asyncio.sleep(0)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _gather(self) -> None:
        """Wait for sessions that are about to come with rounds, where that is worth more than a step without them."""
        while self._ready and not self._closed:
            rows = [session.num_round_rows for session in self._ready]
            now_ns = time.perf_counter_ns()
            if not all(rows):
                return  # prompts do not wait
            context = sum(session.subject.sequence.length for session in self._ready) / len(rows)
            until_ns = self._gathering.wait_until(sum(rows), len(rows), now_ns, partial(self._step_ns, context))
            if until_ns <= now_ns:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout((until_ns - now_ns) / 1e9):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _step_ns(self, context: float, num_rows: int, num_sessions: int) -> float:
        """What a step of rounds takes, with so many cache entries of each session."""
        return self._budget.steps.predict(num_rows, num_sessions, context * num_sessions)

    def _take(self) -> list[tuple[Session, ScheduledSequence]]:
        """What the next step feeds, now in flight. Sessions that were not served in full stay ready."""
        rounds: list[Session] = []
        prompts: list[Session] = []
        for session in self._ready:
            if session.num_round_rows:
                rounds.append(session)
            elif session.num_prefill:
                prompts.append(session)
        self._ready.clear()
        needs = [session.num_prefill for session in prompts]
        count = take_rounds([session.num_round_rows for session in rounds], sum(needs), self._max_rows)
        taken = [
            (session, session.next_round(num_drafts))
            for session, num_drafts in zip(rounds[:count], self._allot(rounds[:count]), strict=True)
        ]
        if prompts:
            drafts = any(part.draft_token_ids for _, part in taken) or self._gathering.expects(time.perf_counter_ns())
            room = prefill_room(sum(len(part.token_ids) for _, part in taken), self._max_rows, is_drafting=drafts)
            for session, num_rows in zip(prompts, share_prefill(needs, room), strict=True):
                if num_rows:
                    taken.append((session, session.next_chunk(num_rows)))
        # Those left out come first next time; those in this step queue up behind them when they are ready again.
        for session in (*rounds[count:], *prompts):
            if not session.in_flight:
                self._ready[session] = None
        return taken

    def _allot(self, rounds: Sequence[Session]) -> list[int]:
        """Drafted tokens to verify of each round: those the step's budget has rows for."""
        wanted = [session.num_draft_tokens for session in rounds]
        if sum(map(bool, wanted)) < 2:
            return wanted  # of one alone the gateway knows more: what its rounds wait for besides
        survivals = [session.survival for session in rounds]
        context = sum(session.subject.sequence.length for session in rounds)
        return self._budget.allot(survivals, context)

    def _learn(self, taken: Sequence[tuple[Session, ScheduledSequence]], result: StepResult) -> None:
        """What the step took, and what was accepted."""
        ended_ns = result.started_ns + result.timings.forward_ns + result.timings.verify_ns
        if self._ended_ns is not None:
            self._budget.observe(result.timings, max(0, result.started_ns - self._ended_ns))
        self._ended_ns = ended_ns
        if not any(part.is_prefill for _, part in taken):
            self._latest = (result.timings.batch_rows, ended_ns - result.started_ns)
        for (session, part), outcome in zip(taken, result.parts, strict=True):
            if part.draft_token_ids and outcome.error is None:
                self._budget.totals.observe(part.depth, outcome.num_accepted)
                session.acceptance.observe(part.depth, outcome.num_accepted)
                if outcome.cut.finish_reason is None and session not in self._ready:
                    self._gathering.left(session, len(part.token_ids), ended_ns)

    async def _step(self, taken: list[tuple[Session, ScheduledSequence]]) -> None:
        with self._settling(taken) as settle:
            settle(await self._run([part for _, part in taken]))

    @contextmanager
    def _settling(self, taken: list[tuple[Session, ScheduledSequence]]) -> Iterator[Callable[[StepResult], None]]:
        """Around a step: what is called with its result. Where it fails its sessions are lost, the others are not."""
        settled = 0

        def settle(result: StepResult) -> None:
            nonlocal settled
            self._learn(taken, result)
            for (session, part), part_result in zip(taken, result.parts, strict=True):
                session.settle(part, part_result, result)
                settled += 1

        self.num_steps += 1
        self._is_running = True
        try:
            yield settle
        except Exception as error:
            logger.exception("a step of %d sessions failed", len(taken))
            failure = error if isinstance(error, TandemError) else InternalError(f"a step failed: {error}")
            for session, _ in taken[settled:]:
                session.crash(failure)
        finally:
            self._is_running = False
