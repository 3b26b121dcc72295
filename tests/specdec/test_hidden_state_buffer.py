"""Hidden states that wait keep their order and their limit, and come back in pieces without a byte changed."""

from __future__ import annotations

import random

import pytest

from specdec.hidden_state_buffer import StateBuffer, pieces
from specdec.types import HiddenStates


def row(position: int, version: int = 0) -> bytes:
    """Three bfloat16 numbers that name a position and where it came from."""
    return bytes([position % 256, position // 256, version, 0, 0, 0])


def states(start: int, end: int, version: int = 0) -> HiddenStates:
    return HiddenStates(start, 3, "bfloat16", b"".join(row(position, version) for position in range(start, end)))


def rows_of(blocks) -> dict[int, bytes]:
    """Row by position; positions must ascend."""
    rows: dict[int, bytes] = {}
    for block in blocks:
        for i in range(block.num_positions):
            assert not rows or max(rows) < block.start + i
            rows[block.start + i] = block.data[i * block.row_bytes : (i + 1) * block.row_bytes]
    return rows


def test_rows_of_a_block():
    block = states(5, 9)
    assert (block.row_bytes, block.num_positions, block.end) == (6, 4, 9)
    assert block.rows(0, 100) is block
    assert block.rows(6, 8) == states(6, 8)
    assert block.rows(8, 100) == states(8, 9)
    for start, end in ((0, 5), (9, 12), (7, 7), (8, 6)):
        assert block.rows(start, end).num_positions == 0


def test_what_continues_is_joined_and_cut_to_size():
    blocks = [states(0, 1), states(1, 4), states(4, 5), states(7, 9)]
    assert list(pieces(blocks)) == [states(0, 5), states(7, 9)]
    assert list(pieces(blocks, 12)) == [states(0, 2), states(2, 4), states(4, 5), states(7, 9)]
    assert list(pieces(blocks, 1)) == [states(i, i + 1) for i in (0, 1, 2, 3, 4, 7, 8)]
    assert list(pieces([])) == []
    wider = HiddenStates(5, 6, "bfloat16", b"0123456789ab")
    assert list(pieces([states(0, 5), wider])) == [states(0, 5), wider]


def test_all_that_is_kept_is_taken_once():
    buffer = StateBuffer()
    buffer.add(states(0, 3))
    buffer.add(states(3, 4))
    assert buffer.num_bytes == 24
    assert buffer.take() == (states(0, 4),)
    assert buffer.take() == ()
    assert buffer.num_bytes == 0


def test_positions_that_come_again_count_anew():
    buffer = StateBuffer()
    buffer.add(states(0, 3))
    buffer.add(states(5, 9))
    buffer.add(states(2, 7, version=1))
    rows = rows_of(buffer.take())
    assert rows == {i: row(i, int(i >= 2)) for i in range(7)}


@pytest.mark.parametrize("seed", range(20))
def test_the_oldest_go_first(seed):
    rng = random.Random(seed)
    buffer, kept = StateBuffer(10 * 6), {}
    for version in range(60):
        start = rng.choice([max(kept, default=-1) + 1, rng.randrange(30)])
        block = states(start, start + rng.randint(1, 14), version % 256)
        buffer.add(block)
        kept = {position: data for position, data in kept.items() if position < start} | rows_of([block])
        assert buffer.num_bytes <= 60
        if rng.random() < 0.3:
            rows = rows_of(buffer.take())
            newest = dict(sorted(kept.items())[-len(rows) :])
            assert rows == newest
            assert len(rows) == len(kept) or len(rows) >= 1
            kept = {}
