"""Rolling back sequences, into blocks that others have as well."""

from __future__ import annotations

import pytest

from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence
from tests.engine.kv_entries import BLOCK, grow
from tests.engine.paged import num_free_blocks


def open_two(pool: KVPool, length: int, shared: int) -> tuple[KVSequence, KVSequence]:
    """A sequence of ``length`` entries, and another one that shares the first ``shared`` of them: whole blocks."""
    first, second = pool.open_empty(("chat",)), pool.open_empty(("chat",))
    assert pool.grow(first, length)
    pool.publish(grow(first, length), range(length))
    assert pool.match(second, range(shared), shared) == shared
    return first, second


@pytest.mark.parametrize("length", [-1, 12])
def test_a_rollback_outside_the_entries_is_an_error(length: int) -> None:
    pool = KVPool(8, BLOCK)
    sequence = grow(pool.open(12), 11)
    with pytest.raises(ValueError, match="cannot roll back"):
        pool.rollback(sequence, length)
    pool.release(sequence)
    with pytest.raises(ValueError, match="was released"):
        pool.rollback(sequence, 0)


def test_rolling_back_into_shared_blocks_gives_them_up() -> None:
    pool = KVPool(8, BLOCK)
    first, second = open_two(pool, 11, 8)
    before = first.blocks.copy()
    pool.rollback(first, 9)
    assert first.blocks.tolist() == before.tolist()
    pool.rollback(first, 2)
    assert second.blocks[:2].tolist() == before[:2].tolist()
    assert not set(first.blocks) & set(second.blocks)
    assert pool.take_copies() == [(before[0], first.blocks[0])]
    pool.release(second)
    pool.release(first)
    assert num_free_blocks(pool) + pool.cached_blocks == 8


def test_rolling_back_into_shared_blocks_of_a_full_pool_keeps_whole_blocks() -> None:
    pool = KVPool(2, BLOCK)
    first, _ = open_two(pool, 8, 8)
    pool.rollback(first, 6)
    assert (first.length, first.capacity, pool.take_copies()) == (4, 4, [])


def test_a_rollback_forgets_the_gaps_behind_it() -> None:
    pool = KVPool(20, BLOCK)
    for length, num_dropped in ((6 * BLOCK, 3 * BLOCK), (4 * BLOCK, 3 * BLOCK), (BLOCK, 0)):
        sequence = grow(pool.open(9 * BLOCK), 9 * BLOCK)
        pool.drop_blocks(sequence, 3, 2)
        pool.drop_blocks(sequence, 1, 1)
        pool.rollback(sequence, length)
        assert (sequence.length, sequence.num_dropped) == (length, num_dropped)
        pool.release(sequence)
