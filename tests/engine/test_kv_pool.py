"""The pool's bookkeeping: budget, growth, entries in common, and entries that are dropped."""

from __future__ import annotations

import numpy as np
import pytest

from engine.kv_pool import CacheFull, KVPool
from engine.kv_sequence import KVSequence
from specdec.errors import InvalidRequest, Overloaded
from tests.engine.kv_entries import BLOCK, Shadow, grow
from tests.engine.paged import num_free_blocks

ALICE, BOB = ("alice",), ("bob",)
TEXT = list(range(100, 120))


def opened(pool: KVPool, scope: tuple[str, ...] | None, num_entries: int) -> KVSequence:
    """A sequence with the entries of the first tokens of ``TEXT``, which others find."""
    sequence = pool.open_empty(scope)
    assert pool.grow(sequence, num_entries)
    grow(sequence, num_entries)
    pool.publish(sequence, TEXT)
    return sequence


def test_blocks_come_as_the_sequence_grows_and_go_back() -> None:
    pool = KVPool(5, BLOCK)
    sequence = pool.open_empty()
    assert (len(sequence.blocks), sequence.capacity, pool.used_blocks, pool.num_open) == (0, 0, 0, 1)
    for num_entries, num_blocks in ((1, 1), (4, 1), (5, 2), (2, 2), (9, 3)):
        assert pool.grow(sequence, num_entries)
        assert (len(sequence.blocks), sequence.capacity) == (num_blocks, num_blocks * BLOCK)
    assert 0 not in sequence.blocks
    before = sequence.blocks
    assert not pool.grow(sequence, 21)
    assert sequence.blocks is before, "a sequence that cannot grow keeps what it has"
    pool.release(sequence)
    pool.release(sequence)
    assert (pool.used_blocks, num_free_blocks(pool), pool.num_open) == (0, 5, 0)


def test_freed_blocks_are_reused_first() -> None:
    pool = KVPool(1000, BLOCK)
    first = pool.open(9)
    pool.release(first)
    assert pool.open(9).blocks.tolist() == first.blocks.tolist() == [1, 2, 3]


def test_a_full_pool_says_what_is_missing() -> None:
    pool = KVPool(5, BLOCK)
    pool.open(12)
    assert pool.can_open(8)
    assert not pool.can_open(9)
    with pytest.raises(CacheFull, match=r"9 tokens need 3 KV blocks and 3 of 5 are in use by 1 open") as caught:
        pool.open(9)
    assert isinstance(caught.value, Overloaded)
    with pytest.raises(InvalidRequest, match=r"needs 6 KV blocks of 4 tokens and the cache has 5"):
        pool.open(21)
    with pytest.raises(ValueError, match="at least 1 token"):
        pool.open(0)
    assert (pool.used_blocks, pool.num_open) == (3, 1)


def test_full_blocks_are_shared_with_the_scope_and_not_with_others() -> None:
    pool = KVPool(20, BLOCK)
    first = opened(pool, ALICE, 11)
    same, other, none = pool.open_empty(ALICE), pool.open_empty(BOB), pool.open_empty()
    assert pool.blocks_to_match(same, TEXT, 19) == (2, 0)
    assert [pool.match(sequence, TEXT, 19) for sequence in (same, other, none)] == [8, 0, 0]
    assert same.blocks.tolist() == first.blocks[:2].tolist()
    assert pool.used_blocks == 3
    pool.release(first)
    assert (pool.used_blocks, pool.cached_blocks) == (2, 0)
    pool.release(same)
    assert (pool.used_blocks, pool.cached_blocks, num_free_blocks(pool)) == (0, 2, 18)


@pytest.mark.parametrize(("end", "found"), [(0, 0), (3, 3), (4, 4), (7, 7), (11, 11), (20, 11)])
def test_a_match_ends_where_it_is_told_to_and_copies_a_partial_block(end: int, found: int) -> None:
    pool = KVPool(20, BLOCK)
    first = opened(pool, ALICE, 11)
    blocks = first.blocks.tolist()
    pool.release(first, TEXT)
    assert (pool.used_blocks, pool.cached_blocks) == (0, 3)
    sequence = pool.open_empty(ALICE)
    assert pool.match(sequence, TEXT, end) == sequence.length == found
    num_full, rest = divmod(found, BLOCK)
    assert sequence.blocks[:num_full].tolist() == blocks[:num_full]
    assert pool.take_copies() == ([(blocks[num_full], sequence.blocks[num_full])] if rest else [])


def test_a_match_within_a_block_needs_a_quarter_of_it() -> None:
    pool = KVPool(20, 8)
    pool.release(opened(pool, ALICE, 8), TEXT)
    for num_common, found in ((1, 0), (2, 2), (7, 7)):
        sequence = pool.open_empty(ALICE)
        assert pool.match(sequence, [*TEXT[:num_common], *[7] * 20], 20) == found


def test_a_block_computed_twice_is_kept_once() -> None:
    pool = KVPool(20, BLOCK)
    first, second = opened(pool, ALICE, 8), opened(pool, ALICE, 6)
    assert second.blocks[0] == first.blocks[0] != second.blocks[1]
    assert pool.used_blocks == 3
    grow(second, 2)
    assert second.length >= second.publishable_from
    pool.publish(second, TEXT)
    assert second.length < second.publishable_from
    assert second.blocks.tolist() == first.blocks.tolist()
    assert (pool.used_blocks, num_free_blocks(pool)) == (2, 18)


def test_a_reserved_sequence_takes_over_what_others_have_computed_meanwhile() -> None:
    pool = KVPool(20, BLOCK)
    second = pool.open_empty(ALICE)
    assert pool.grow(second, 12)
    first = opened(pool, ALICE, 8)
    assert pool.match(second, TEXT, 11) == 8
    assert second.blocks[:2].tolist() == first.blocks.tolist()
    assert (second.capacity, pool.used_blocks) == (12, 3)
    assert pool.match(second, TEXT, 11) == 0


def test_the_next_block_of_equal_texts_is_the_same() -> None:
    pool = KVPool(20, BLOCK)
    first, second, other = (pool.open_empty(scope) for scope in (ALICE, ALICE, BOB))
    assert pool.next_block(first, TEXT) == pool.next_block(second, TEXT) != pool.next_block(other, TEXT)
    assert pool.next_block(first, [*TEXT[:3], 7]) != pool.next_block(first, TEXT)
    assert pool.next_block(first, TEXT[:3]) is None
    assert pool.next_block(pool.open_empty(), TEXT) is None


def test_the_end_of_a_text_is_reused_before_its_beginning_and_the_oldest_text_first() -> None:
    pool = KVPool(6, BLOCK)
    old, new = opened(pool, ALICE, 12), opened(pool, BOB, 12)
    pool.release(old)
    pool.release(new)
    lengths = []
    for num_blocks in range(1, 7):
        sequence = pool.open(num_blocks * BLOCK)
        pool.release(sequence)
        found = [pool.blocks_to_match(pool.open_empty(scope), TEXT, 20)[0] for scope in (ALICE, BOB)]
        lengths.append(tuple(found))
    assert lengths == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_what_is_found_is_in_use_again_and_not_reused() -> None:
    pool = KVPool(4, BLOCK)
    pool.release(opened(pool, ALICE, 8))
    sequence = pool.open_empty(ALICE)
    assert pool.blocks_to_match(sequence, TEXT, 19) == (2, 2)
    assert pool.match(sequence, TEXT, 19) == 8
    assert (pool.used_blocks, pool.available_blocks) == (2, 2)
    assert not pool.grow(sequence, 17)
    assert pool.grow(sequence, 16)


def test_a_sequence_that_loses_its_blocks_finds_them_as_long_as_they_are_cached() -> None:
    pool = KVPool(6, BLOCK)
    sequence = opened(pool, ALICE, 11)
    pool.vacate(sequence)
    assert (sequence.length, sequence.capacity, pool.used_blocks, pool.cached_blocks) == (0, 0, 0, 2)
    assert pool.match(sequence, TEXT, 11) == 8
    pool.vacate(sequence)
    pool.release(pool.open(20))
    assert pool.match(sequence, TEXT, 11) == 4


def test_no_entry_is_written_where_others_may_read() -> None:
    pool = KVPool(8, BLOCK)
    sequence = opened(pool, ALICE, 11)
    blocks = sequence.blocks.tolist()
    pool.rollback(sequence, 9)
    assert sequence.blocks.tolist() == blocks
    pool.rollback(sequence, 6)
    assert sequence.blocks[0] == blocks[0]
    assert len(sequence.blocks) == 2
    assert sequence.blocks[1] not in blocks
    assert pool.take_copies() == [(blocks[1], sequence.blocks[1])]
    assert pool.blocks_to_match(pool.open_empty(ALICE), TEXT, 20)[0] == 2


def test_without_a_block_for_the_copy_whole_blocks_are_kept() -> None:
    pool = KVPool(3, BLOCK)
    sequence, reader = opened(pool, ALICE, 8), pool.open_empty(ALICE)
    pool.match(reader, TEXT, 8)
    other = pool.open(4)
    pool.rollback(sequence, 6)
    assert (sequence.length, pool.take_copies()) == (4, [])
    pool.release(other)


def test_texts_with_gaps_are_not_found_behind_them() -> None:
    pool = KVPool(20, BLOCK)
    sequence = opened(pool, ALICE, 12)
    pool.drop_blocks(sequence, 1, 1)
    pool.grow(sequence, 16)
    grow(sequence, 8)
    pool.publish(sequence, TEXT)
    pool.release(sequence, TEXT)
    found = pool.open_empty(ALICE)
    assert pool.match(found, TEXT, 20) == 12


def test_blocks_behind_a_gap_are_not_found_once_the_block_before_is_reused() -> None:
    """A cached block that others follow is reused: of those, what nobody has is free, and the rest stays in use."""
    pool = KVPool(8, BLOCK)
    sequence, other = opened(pool, ALICE, 16), pool.open_empty(ALICE)
    pool.match(other, TEXT, 8)
    pool.release(other)
    pool.drop_blocks(sequence, 1, 1)
    last = sequence.blocks[-1]
    assert (pool.used_blocks, pool.cached_blocks) == (3, 1)
    large = pool.open(20)
    assert last not in large.blocks
    assert (pool.used_blocks, pool.cached_blocks, pool.available_blocks) == (8, 0, 0)
    assert pool.blocks_to_match(pool.open_empty(ALICE), TEXT, 16) == (1, 0)
    pool.release(sequence)
    assert pool.used_blocks == 5


def test_dropped_blocks_go_back() -> None:
    pool = KVPool(8, BLOCK)
    sequence = pool.open(6 * BLOCK)
    shadow = Shadow(pool, np.zeros((9, BLOCK), dtype=np.int64), {sequence: []})
    shadow.feed(sequence, list(range(5 * BLOCK + 1)))
    pool.drop_blocks(sequence, 1, 3)
    del shadow.expected[sequence][BLOCK : 4 * BLOCK]
    assert (sequence.length, sequence.num_dropped, pool.used_blocks) == (2 * BLOCK + 1, 3 * BLOCK, 3)
    shadow.check()
    assert pool.grow(sequence, 6 * BLOCK)
    shadow.feed(sequence, list(range(100, 100 + 4 * BLOCK - 1)))
    shadow.check()
    pool.drop_blocks(sequence, 0, 6)
    assert (sequence.length, sequence.num_dropped, pool.used_blocks) == (0, 9 * BLOCK, 0)
    pool.release(sequence)


def test_a_cut_before_dropped_entries_forgets_them() -> None:
    """What is fed next follows the entries that are there, as in a sequence that never had others."""
    pool = KVPool(20, BLOCK)
    lengths = ((3 * BLOCK + 1, 3 * BLOCK), (3 * BLOCK, BLOCK), (BLOCK + 1, BLOCK), (BLOCK, 0), (0, 0))
    for length, num_dropped in lengths:
        sequence = grow(pool.open(9 * BLOCK), 9 * BLOCK)
        pool.drop_blocks(sequence, 4, 2)
        pool.drop_blocks(sequence, 1, 1)
        assert (sequence.length, sequence.num_dropped) == (6 * BLOCK, 3 * BLOCK)
        pool.rollback(sequence, length)
        assert (sequence.length, sequence.num_dropped) == (length, num_dropped)
        pool.release(sequence)


def test_dropping_beside_a_gap_makes_one_gap() -> None:
    pool = KVPool(8, BLOCK)
    sequence = grow(pool.open(8 * BLOCK), 8 * BLOCK)
    pool.drop_blocks(sequence, 2, 1)
    pool.drop_blocks(sequence, 4, 1)
    pool.drop_blocks(sequence, 1, 3)
    assert (sequence.length, sequence.num_dropped) == (3 * BLOCK, 5 * BLOCK)
    pool.rollback(sequence, BLOCK)
    assert sequence.num_dropped == 0


def test_nothing_is_dropped_where_attention_has_windows() -> None:
    pool = KVPool(8, BLOCK, has_windows=True)
    sequence = grow(pool.open(3 * BLOCK), 3 * BLOCK)
    with pytest.raises(ValueError, match="sliding window"):
        pool.drop_blocks(sequence, 1, 1)


def test_blocks_that_cannot_be_dropped() -> None:
    pool = KVPool(8, BLOCK)
    sequence = pool.open(4 * BLOCK)
    sequence.length = 3 * BLOCK - 1
    for first, count in ((0, 3), (2, 1), (-1, 1)):
        with pytest.raises(ValueError, match="cannot drop blocks"):
            pool.drop_blocks(sequence, first, count)
