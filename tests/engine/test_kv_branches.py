"""Branches of sequences: what they share, copy and pass on."""

from __future__ import annotations

import pytest

from engine.kv_pool import KVPool
from tests.engine.kv_entries import BLOCK, grow
from tests.engine.paged import num_free_blocks


def test_a_branch_shares_full_blocks_and_copies_the_partial_one() -> None:
    pool = KVPool(8, BLOCK)
    parent = grow(pool.open(12), 11)
    child = pool.branch(parent, 10, 16)
    assert child is not None
    assert child.blocks[:2].tolist() == parent.blocks[:2].tolist()
    assert not set(child.blocks[2:]) & set(parent.blocks)
    assert pool.take_copies() == [(parent.blocks[2], child.blocks[2])]
    assert pool.take_copies() == []
    assert (child.length, pool.used_blocks) == (10, 5)
    pool.release(parent)
    assert pool.used_blocks == 4
    pool.release(child)
    assert num_free_blocks(pool) == 8


def test_a_branch_takes_few_free_blocks_and_drives_nobody_out() -> None:
    pool = KVPool(8, BLOCK)
    parent = grow(pool.open(24), 10)
    cached = pool.open_empty(("chat",))
    pool.grow(cached, 4)
    pool.release(grow(cached, 4), range(4))
    branch = pool.branch(parent, 9, 12)
    assert branch is not None
    assert branch.blocks[:2].tolist() == parent.blocks[:2].tolist()
    assert (len(branch.blocks), branch.length, branch.capacity) == (3, 9, 12)
    assert pool.take_copies() == [(parent.blocks[2], branch.blocks[2])]
    assert (pool.used_blocks, pool.num_open, num_free_blocks(pool)) == (7, 1, 0)
    assert pool.branch(parent, 9, 12) is None  # the last block is cached
    assert pool.cached_blocks == 1
    pool.release(branch)
    pool.release(branch)
    assert (pool.used_blocks, pool.num_open, num_free_blocks(pool)) == (6, 1, 1)


def test_an_adopted_branch_is_the_sequence() -> None:
    pool = KVPool(9, BLOCK)
    parent = grow(pool.open(24), 10)
    branch = pool.branch(parent, 5, 11)
    assert branch is not None
    grow(branch, 6)
    assert branch.capacity == 12
    deeper = pool.branch(branch, 9, 12)
    assert deeper is not None
    grow(deeper, 2)
    pool.adopt(parent, deeper)
    assert (parent.length, parent.capacity) == (11, 12)
    assert parent.blocks.tolist() == deeper.blocks.tolist()
    assert (deeper.released, pool.num_open, pool.used_blocks) == (True, 1, 4)  # one block of `branch` is its own
    pool.release(branch)
    assert pool.used_blocks == 3
    pool.rollback(parent, 2)
    pool.release(parent)
    assert num_free_blocks(pool) == 9


def test_an_adopted_branch_keeps_what_others_find() -> None:
    pool = KVPool(9, BLOCK)
    parent = pool.open_empty(("chat",))
    pool.grow(parent, 12)
    grow(parent, 12)
    pool.publish(parent, range(12))
    branch = pool.branch(parent, 9, 16)
    assert branch is not None
    grow(branch, 3)
    pool.adopt(parent, branch)
    other = pool.open_empty(("chat",))
    assert pool.match(other, range(12), 12) == 12, "the third block is cached"
    pool.publish(parent, [*range(9), 7, 7, 7])
    assert pool.match(pool.open_empty(("chat",)), [*range(9), 7, 7, 7], 12) == 12


def test_only_an_open_branch_is_adopted() -> None:
    pool = KVPool(9, BLOCK)
    parent = grow(pool.open(8), 6)
    with pytest.raises(ValueError, match="is no branch"):
        pool.adopt(parent, pool.open(4))
    branch = pool.branch(parent, 6, 12)
    assert branch is not None
    pool.release(branch)
    with pytest.raises(ValueError, match="was released"):
        pool.adopt(parent, branch)
    with pytest.raises(ValueError, match="cannot branch off"):
        pool.branch(parent, 7, 8)


@pytest.mark.parametrize("length", [-1, 12])
def test_a_branch_or_rollback_outside_the_entries_is_an_error(length: int) -> None:
    pool = KVPool(8, BLOCK)
    parent = grow(pool.open(12), 11)
    with pytest.raises(ValueError, match="cannot branch off"):
        pool.branch(parent, length, 16)
    with pytest.raises(ValueError, match="cannot roll back"):
        pool.rollback(parent, length)
    pool.release(parent)
    with pytest.raises(ValueError, match="was released"):
        pool.rollback(parent, 0)


def test_rolling_back_into_shared_blocks_gives_them_up() -> None:
    pool = KVPool(8, BLOCK)
    parent = grow(pool.open(12), 11)
    child = pool.branch(parent, 8, 12)
    assert child is not None
    before = parent.blocks.copy()
    pool.rollback(parent, 9)
    assert parent.blocks.tolist() == before.tolist()
    pool.rollback(parent, 2)
    assert child.blocks[:2].tolist() == before[:2].tolist()
    assert not set(parent.blocks) & set(child.blocks)
    assert pool.take_copies() == [(before[0], parent.blocks[0])]
    pool.release(child)
    pool.release(parent)
    assert num_free_blocks(pool) == 8


def test_rolling_back_into_shared_blocks_of_a_full_pool_keeps_whole_blocks() -> None:
    pool = KVPool(3, BLOCK)
    parent = grow(pool.open(8), 8)
    assert pool.branch(parent, 8, 12) is not None
    pool.rollback(parent, 6)
    assert (parent.length, parent.capacity, pool.take_copies()) == (4, 4, [])


@pytest.mark.parametrize(("length", "num_dropped"), [(6 * BLOCK, 3 * BLOCK), (4 * BLOCK, BLOCK * 3), (BLOCK, 0)])
def test_a_branch_has_the_gaps_of_its_entries_and_passes_them_on(length: int, num_dropped: int) -> None:
    pool = KVPool(20, BLOCK)
    sequence = grow(pool.open(9 * BLOCK), 9 * BLOCK)
    pool.drop_blocks(sequence, 3, 2)
    pool.drop_blocks(sequence, 1, 1)
    branch = pool.branch(sequence, length, length + 1)
    assert branch is not None
    assert branch.num_dropped == num_dropped
    pool.rollback(sequence, 0)
    assert sequence.num_dropped == 0
    pool.adopt(sequence, branch)
    assert (sequence.length, sequence.num_dropped) == (length, num_dropped)
