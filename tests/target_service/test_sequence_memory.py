"""Who gets blocks, and who loses them: many sessions in virtual time on a small pool, and planted bugs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from math import ceil, log2

import pytest

from engine.kv_pool import CacheFull, KVPool
from engine.kv_sequence import KVSequence
from specdec.scheduling.admission import ClientFull
from target_service import sequence_memory
from target_service.sequence_memory import MAX_PREEMPTIONS, SequenceMemory

BLOCK = 4


class Visitor:
    """A session that is fed a prompt, at most a few tokens a step, and then one token a step to its end."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.client = rng.choice("abc")
        prompt_len = rng.randint(1, 20)
        common = rng.choice(([1] * 12, [2] * 12))
        self.tokens = [*common, *(rng.randrange(50) for _ in range(prompt_len))][:prompt_len]
        self.max_len = prompt_len + rng.randint(1, 34)
        self.num_doublings = ceil(log2(self.max_len / prompt_len)) + 1
        self.sequence: KVSequence | None = None
        self.num_preemptions = 0
        self.is_opened = False
        self.in_flight = False
        self.idle_until = 0
        self.now = 0

    @property
    def has_work(self) -> bool:
        return self.now >= self.idle_until

    @property
    def idle_ns(self) -> int:
        return 0 if self.has_work else 2 * sequence_memory.MAX_IDLE_NS * (self.idle_until - self.now > 5)

    @property
    def reusable(self) -> tuple[Sequence[int], int]:
        return self.tokens, len(self.tokens) - 1

    def matched(self, num_tokens: int) -> None:
        assert num_tokens > 0

    def preempt(self) -> None:
        assert not self.in_flight
        self.num_preemptions += 1

    @property
    def num_missing(self) -> int:
        assert self.sequence is not None
        return len(self.tokens) - self.is_opened - self.sequence.length

    def step(self, pool: KVPool, rng: random.Random) -> bool:
        """Feed some tokens; True at the end."""
        assert self.sequence is not None
        sequence = self.sequence
        num_missing = self.num_missing
        num_rows = min(num_missing, 6) or 1
        assert sequence.length + num_rows <= sequence.capacity, "fed without a block"
        sequence.length += num_rows
        if not num_missing or (num_rows == num_missing and not self.is_opened):
            self.is_opened = True
            self.tokens.append(rng.randrange(50))
        pool.publish(sequence, self.tokens)
        return len(self.tokens) >= self.max_len


def simulate(memory_class: type[SequenceMemory], seed: int, num_visitors: int = 25) -> int:
    """Run visitors to their end; returns how often they were preempted."""
    rng = random.Random(seed)
    has_limits = seed % 2 == 1
    pool = KVPool(rng.randint(14, 22), BLOCK)
    memory = memory_class(pool)
    queue = deque(Visitor(number, rng) for number in range(num_visitors))
    inside: list[Visitor] = []
    for now in range(6000):
        if not queue and not inside:
            break
        for visitor in inside:
            visitor.now = now
        while queue and len(inside) < 16:
            visitor = queue[0]
            is_waiting = [each for each in inside if each.has_work and memory.is_waiting(sequence_of(each))]
            try:
                limit = max(pool.blocks_for(visitor.max_len), pool.total_blocks // 2) if has_limits else None
                visitor.sequence = memory.admit(
                    visitor.tokens, len(visitor.tokens) - 1, visitor.max_len, scope=("x",), client=visitor.client,
                    client_limit=limit,
                )  # fmt: skip
            except (CacheFull, ClientFull):
                break
            assert not is_waiting or has_limits, "a newcomer overtook a session that lost its blocks"
            memory.belongs_to(visitor.sequence, visitor)
            inside.append(queue.popleft())
        was_waiting = [each for each in inside if each.has_work and memory.is_waiting(sequence_of(each))]
        memory.come_back()
        back = [each.number for each in was_waiting if not memory.is_waiting(sequence_of(each))]
        in_order = sorted(each.number for each in was_waiting)[: len(back)]
        assert back == in_order or has_limits, "not in order of arrival"
        in_step = []
        for visitor in rng.sample(inside, len(inside)):
            sequence = sequence_of(visitor)
            if not visitor.has_work or memory.is_waiting(sequence):
                continue
            memory.match(sequence)
            if memory.grow(sequence, sequence.length + (min(visitor.num_missing, 6) or 1)):
                visitor.in_flight = True
                in_step.append(visitor)
        for visitor in in_step:
            visitor.in_flight = False
            if visitor.step(pool, rng):
                memory.release(sequence_of(visitor), visitor.tokens)
                inside.remove(visitor)
            elif rng.random() < 0.05:
                visitor.idle_until = now + rng.randint(1, 12)
            assert visitor.num_preemptions <= MAX_PREEMPTIONS + visitor.num_doublings
        assert pool.used_blocks <= pool.total_blocks
    else:
        raise AssertionError(f"{len(queue)} and {len(inside)} sessions have not ended")
    assert pool.used_blocks == 0
    return memory.num_preemptions


def sequence_of(visitor: Visitor) -> KVSequence:
    assert visitor.sequence is not None
    return visitor.sequence


SEEDS = range(40)


@pytest.mark.parametrize(("reserved", "least"), [(0.0, 40), (sequence_memory.RESERVED_BLOCKS, 10)])
def test_every_session_ends_and_none_loses_its_blocks_too_often(
    reserved: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_memory, "RESERVED_BLOCKS", reserved)
    assert sum(simulate(SequenceMemory, seed) for seed in SEEDS) > least


class PreemptsForEver(SequenceMemory):
    """Every session may lose its blocks any number of times."""

    def _take_from(self, victim) -> None:  # type: ignore[no-untyped-def]
        super()._take_from(victim)
        victim.num_preemptions = 0  # so it is never safe


class PreemptsInFlight(SequenceMemory):
    """Blocks are taken under a step."""

    def _preempt(self, client: str | None) -> bool:
        for holding in self._holdings.values():
            if holding.occupant is not None and holding.occupant.in_flight:
                self._take_from(holding)
                return True
        return super()._preempt(client)


class LetsNewcomersPass(SequenceMemory):
    """Sessions that lost their blocks do not keep others out."""

    def admit(self, *args, **given):  # type: ignore[no-untyped-def]
        waiting = [holding for holding in self._holdings.values() if holding.is_waiting]
        for holding in waiting:
            holding.is_waiting = False
        try:
            return super().admit(*args, **given)
        finally:
            for holding in waiting:
                holding.is_waiting = True


class ComesBackInAnyOrder(SequenceMemory):
    """Whoever fits comes back first."""

    def come_back(self) -> None:
        for holding in [*self._holdings.values()][::-1]:
            if holding.is_waiting and holding.has_work:
                token_ids, num_reusable = holding.occupant.reusable
                if self._fill(holding, token_ids, num_reusable, len(token_ids)):
                    holding.is_waiting = False


class GivesNothingBack(SequenceMemory):
    """An ended session keeps its blocks."""

    def release(self, sequence: KVSequence, token_ids: Sequence[int] = ()) -> None:
        self._holdings.pop(sequence, None)


class ForgetsToReserve(SequenceMemory):
    """A session comes back without blocks."""

    def _fill(self, holding, token_ids, num_reusable, num_entries) -> bool:  # type: ignore[no-untyped-def]
        return holding.is_waiting or super()._fill(holding, token_ids, num_reusable, num_entries)


@pytest.mark.parametrize(
    "twin",
    [PreemptsForEver, PreemptsInFlight, LetsNewcomersPass, ComesBackInAnyOrder, GivesNothingBack, ForgetsToReserve],
)
def test_the_simulation_finds_a_planted_bug(twin: type[SequenceMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_memory, "RESERVED_BLOCKS", 0.0)

    def survives(seed: int) -> bool:
        try:
            simulate(twin, seed)
        except (AssertionError, CacheFull, ValueError):
            return False
        return True

    assert not all(survives(seed) for seed in SEEDS)


def test_a_session_that_fills_the_pool_alone_is_never_refused() -> None:
    pool = KVPool(5, BLOCK)
    memory = SequenceMemory(pool)
    sequence = memory.admit(range(17), 16, 20)
    with pytest.raises(CacheFull, match="5 of 5 KV blocks are in use"):
        memory.admit(range(1), 0, 2)
    assert memory.grow(sequence, 20)
    memory.release(sequence)
    memory.release(sequence)
    assert pool.used_blocks == 0


def test_a_client_at_its_limit_preempts_its_own_session() -> None:
    pool = KVPool(20, BLOCK)
    memory = SequenceMemory(pool)
    sequences = [memory.admit(range(8), 0, 40, client=client, client_limit=5) for client in ("mine", "mine", "other")]
    assert memory.grow(sequences[0], 12)
    assert memory.grow(sequences[0], 16)
    assert [len(sequence.blocks) for sequence in sequences] == [4, 0, 2]
    with pytest.raises(ClientFull, match="of the 5 KV blocks"):
        memory.admit(range(8), 0, 8, client="mine", client_limit=5)
