"""Messages as flat buffers: what comes out is what went in."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Segment, build_batch
from engine.kv_pool import KVPool
from engine.parallel.messages import (
    Operation,
    decode_copies,
    decode_moves,
    decode_pass,
    encode,
    encode_copies,
    encode_moves,
    encode_pass,
    operation_of,
)
from engine.recurrent.slots import StateSlots


@pytest.mark.parametrize("parents", [(), (-1, 0, 0)])
def test_a_batch_survives(parents: tuple[int, ...]) -> None:
    pool = KVPool(50, 4)
    long, short = pool.open(40), pool.open(9)
    long.length = 13
    segments = [Segment(long, [5, 6, 7], 2, parents=parents), Segment(short, [8], 1, 1, (0, 2))]
    batch = build_batch(segments, block_size=4, vocab_size=20, max_model_len=64)
    message = encode_pass(batch, [3], (0, 2))
    assert operation_of(message) == Operation.PASS
    assert message[0] == len(message)
    made, rows, layers = decode_pass(message)
    assert (rows, layers) == ([3], (0, 2))
    assert (made.row_starts, made.kv_lens) == (batch.row_starts, batch.kv_lens)
    for name in ("positions", "slots", "row_starts", "block_tables", "kv_lens", "ancestors"):
        one, other = getattr(batch.plan, name), getattr(made.plan, name)
        if one is None:
            assert other is None
            continue
        assert torch.equal(one, other)
        assert (one.dtype, other.is_contiguous()) == (other.dtype, True)
    for name in ("max_kv_len", "max_rows", "block_size"):
        assert getattr(batch.plan, name) == getattr(made.plan, name)
    assert torch.equal(made.input_ids, batch.input_ids)
    assert torch.equal(made.logit_rows, batch.logit_rows)
    assert made.states is None


def test_what_a_pass_does_to_states_survives() -> None:
    pool = KVPool(50, 4, states=StateSlots(3))
    one, other = pool.open(40), pool.open(9)
    one.length = other.length = 5
    assert one.states is not None
    one.states.base, one.states.end = 3, 5
    segments = [Segment(one, [5, 6, 7], 2), Segment(other, [8], 1)]
    batch = build_batch(segments, block_size=4, vocab_size=20, max_model_len=64)
    made, _, _ = decode_pass(encode_pass(batch, [], ()))
    assert made.states is not None
    assert batch.states is not None
    assert made.states.numbers.equal(batch.states.numbers)


def test_moves_and_copies_survive() -> None:
    moves, copies = [(1, 2, 3, 2**40), (5, 6, 7, 8)], [(1, 2), (3, 4), (5, 6)]
    message = encode_moves(moves)
    assert (operation_of(message), decode_moves(message)) == (Operation.MOVE_ENTRIES, moves)
    for operation in (Operation.COPY_BLOCKS, Operation.COPY_STATES):
        message = encode_copies(copies, operation)
        assert (operation_of(message), decode_copies(message)) == (operation, copies)


@pytest.mark.parametrize("operation", [Operation.HEARTBEAT, Operation.STOP])
def test_messages_without_more(operation: Operation) -> None:
    message = encode(operation)
    assert (operation_of(message), message[0], len(message)) == (operation, 2, 2)
