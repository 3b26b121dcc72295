"""What the memory of sequences costs the event loop in each step, without a model; see :mod:`benchmarks.memory`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any, Final

from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from specdec.types import SessionSpec
from target_service.scheduler.batcher import Deliver, Follow, StepBatcher
from target_service.sequence_memory import SequenceMemory
from target_service.session.session import Session
from target_service.step import PartResult, ScheduledSequence, StepResult, StepSession
from target_service.stop_criteria import StopCriteria, Truncation

SIZE: Final = 32
CONTEXT: Final = 2048
SCOPE: Final = ("", "")


class UncheckedMemory:
    """In place of :class:`SequenceMemory`: there is always room, and nothing to find."""

    def come_back(self) -> None:
        """Nobody waits."""

    def match(self, _: KVSequence) -> Hashable | None:
        """Nothing is found."""
        return None

    def grow(self, _: KVSequence, __: int) -> bool:
        """There is room."""
        return True

    def is_waiting(self, _: KVSequence) -> bool:
        """It is not."""
        return False


class FakeTarget:
    """Sessions in multi-step decode on a device that needs no time. Implements ``SessionOwner``."""

    def __init__(self, num_sessions: int, *, with_memory: bool) -> None:
        self.pool = KVPool(2 * num_sessions * CONTEXT // SIZE, SIZE)
        self.memory = SequenceMemory(self.pool)
        self._with_memory = with_memory
        given: Any = self.memory if with_memory else UncheckedMemory()
        self.batcher = StepBatcher(self._run, num_sessions + SIZE, given, lambda error: None)
        self._num_sessions = num_sessions
        self._returned_ns = 0
        #: Nanoseconds from the end of each step with all sessions to the begin of the next one.
        self.between_ns: list[int] = []
        self._num_steps = 0
        self._ended = asyncio.Event()

    async def _run(self, parts: Sequence[ScheduledSequence], follow: Follow, deliver: Deliver) -> StepResult:
        if len(parts) == self._num_sessions and self._returned_ns:
            self.between_ns.append(time.perf_counter_ns() - self._returned_ns)
        if len(self.between_ns) >= self._num_steps:
            self._ended.set()
        await asyncio.sleep(0)
        for part in parts:
            part.session.sequence.length += len(part.token_ids)
            if part.decides:
                part.session.state.commit((1,))
        result = StepResult(
            [PartResult(Truncation((1,)) if part.decides else Truncation(())) for part in parts], time.perf_counter_ns()
        )
        self._returned_ns = time.perf_counter_ns() if len(parts) == self._num_sessions else 0
        return result

    async def decode(self, num_steps: int) -> float:
        """Median microseconds between two steps."""
        self._num_steps = num_steps
        for number in range(self._num_sessions):
            prompt = (number + 2, *range(2, 18))
            params = SamplingParams(seed=0, max_tokens=CONTEXT - len(prompt), ignore_eos=True)
            ids: dict[str, Any] = {"session_id": str(number), "token_ids": prompt, "prompt_len": len(prompt)}
            spec = SessionSpec(**ids, params=params, multi_step_tokens=CONTEXT)
            sequence = self.memory.admit(prompt, len(prompt) - 1, CONTEXT, scope=SCOPE)
            if not self._with_memory:
                self.pool.grow(sequence, CONTEXT)
            state = SamplingState(params, prompt, len(prompt), CONTEXT)
            session = Session(
                StepSession(spec, state, sequence, Rule.BLOCK, StopCriteria(len(prompt), CONTEXT, frozenset(), 0)),
                self,
                time.perf_counter_ns(),
            )
            self.memory.belongs_to(sequence, session)
            self.ready(session)
        await self._ended.wait()
        await self.batcher.close()
        return median(self.between_ns) / 1e3

    def ready(self, session: Session) -> None:
        """It has something to feed."""
        self.batcher.add(session)

    def count_stale(self) -> None:
        """There are none."""

    def count_superseded(self, count: int = 1) -> None:
        """There are none."""

    def keep_states(self, sequence: KVSequence, interval: int) -> None:
        """There are none."""

    def keep(self, sequence: KVSequence, length: int, token_ids: Sequence[int]) -> None:
        """As ``TargetCore`` does it."""
        if self._with_memory:
            if sequence.length != length:
                self.pool.rollback(sequence, length)
            if sequence.length >= sequence.publishable_from:
                self.pool.publish(sequence, token_ids)

    def finish(self, session: Session) -> None:
        """It has ended."""

    def release(self, session: Session) -> None:
        """It was closed."""


async def between_steps(num_sessions: int, num_steps: int, repeats: int) -> tuple[list[float], list[float]]:
    """Microseconds from a step's end to the next one's begin, with and without memory, in turn."""
    found: tuple[list[float], list[float]] = [], []
    for number in range(2 * repeats):
        has_memory = number % 4 in (0, 3)
        found[not has_memory].append(await FakeTarget(num_sessions, with_memory=has_memory).decode(num_steps))
    return found
