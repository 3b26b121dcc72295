"""What the memory of sequences costs the event loop in each step, without a model; see :mod:`benchmarks.memory`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from itertools import pairwise
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


class FakeOccupant:
    """A session with tokens to feed."""

    in_flight = False
    has_work = True
    idle_ns = 0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.reusable = token_ids, len(token_ids) - 1

    def matched(self, num_tokens: int) -> None:
        """Nothing is counted."""

    def preempt(self) -> None:
        """Nothing is to be done."""


def calls(num_sessions: int, num_steps: int) -> dict[str, float]:
    """Microseconds that the calls of all sessions take in a step, each kind timed as one loop."""
    texts = [[number + 1, *range(CONTEXT - 1)] for number in range(num_sessions)]
    spent: dict[str, float] = {}
    for name, share in {"": None, ", a client's share limited": 0.9}.items():
        pool = KVPool(num_sessions * CONTEXT // SIZE, SIZE)
        memory = SequenceMemory(pool)
        limit = None if share is None else int(share * pool.total_blocks)
        sequences = [
            memory.admit(text[: number + SIZE], 0, CONTEXT, scope=SCOPE, client_limit=limit)
            for number, text in enumerate(texts)
        ]
        for number, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            memory.belongs_to(sequence, FakeOccupant(text))
            sequence.length = number + SIZE
        times: dict[str, list[int]] = {kind: [] for kind in ("come_back", "grow", "rollback", "publish")}
        for _ in range(num_steps):
            marks = [time.perf_counter_ns()]
            memory.come_back()
            marks.append(time.perf_counter_ns())
            for each in sequences:
                memory.grow(each, each.length + 5)
            marks.append(time.perf_counter_ns())
            for each in sequences:
                each.length += 5
            began = time.perf_counter_ns()
            for each in sequences:
                pool.rollback(each, each.length - 3)
            marks.append(marks[-1] + time.perf_counter_ns() - began)
            began = time.perf_counter_ns()
            for each, text in zip(sequences, texts, strict=True):
                pool.publish(each, text)
            marks.append(marks[-1] + time.perf_counter_ns() - began)
            for taken, (before, after) in zip(times.values(), pairwise(marks), strict=True):
                taken.append(after - before)
        spent |= {f"{kind}{name}": median(each) / 1e3 for kind, each in times.items()}
    spent["match, one prompt of 1,500 tokens, none found"] = _match_us(1500, num_found=0)
    spent["match, one prompt of 1,500 tokens, all found"] = _match_us(1500, num_found=1500)
    for length in (200, 1500):
        spent[f"come_back, one session of {length:,} tokens waits"] = _waiting_us(length)
    return spent


def _match_us(length: int, *, num_found: int) -> float:
    pool, text, times = KVPool(1000, SIZE), list(range(length)), []
    other = pool.open_empty(SCOPE)
    pool.grow(other, length)
    other.length = num_found
    pool.publish(other, text)
    for _ in range(200):
        sequence = pool.open_empty(SCOPE)
        began = time.perf_counter_ns()
        pool.match(sequence, text, length - 1)
        times.append(time.perf_counter_ns() - began)
        pool.release(sequence)
    return median(times) / 1e3


def _waiting_us(length: int) -> float:
    """A session's blocks were taken, are cached, and another one has what it needs."""
    pool, text, times = KVPool(100, SIZE), list(range(length)), []
    memory = SequenceMemory(pool)
    first = memory.admit([1], 0, CONTEXT)
    memory.belongs_to(first, FakeOccupant([1]))
    second = memory.admit(text, 0, CONTEXT, scope=SCOPE)
    memory.belongs_to(second, FakeOccupant(text))
    second.length = length
    pool.publish(second, text)
    memory.grow(first, (pool.available_blocks + 2) * SIZE)  # one more than there are
    assert memory.is_waiting(second)
    assert pool.cached_blocks == length // SIZE
    for _ in range(200):
        began = time.perf_counter_ns()
        memory.come_back()
        times.append(time.perf_counter_ns() - began)
    assert memory.is_waiting(second)
    return median(times) / 1e3
