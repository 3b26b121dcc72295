"""What rank 0 tells the other ranks: one flat buffer of int64 for each thing that touches the device.

The first word of a message is its length, the second its operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise

import numpy as np
import torch

from engine.batch import Batch
from engine.parallel.ranks import Words
from engine.plan import BatchPlan
from engine.recurrent.plan import StatePlan


class Operation(IntEnum):
    """What a message asks for."""

    #: Nothing: rank 0 is there.
    HEARTBEAT = 0
    #: A forward pass.
    PASS = 1
    #: :func:`engine.compaction.move_entries`.
    MOVE_ENTRIES = 2
    #: :func:`engine.compaction.copy_blocks`.
    COPY_BLOCKS = 3
    #: The end.
    STOP = 4
    #: :meth:`engine.runner.Runner.warm_up`.
    WARM_UP = 5
    #: :meth:`engine.engine.Engine.copy_states`.
    COPY_STATES = 6


def operation_of(words: Words) -> Operation:
    """What a message asks for."""
    return Operation(int(words[1]))


def encode(operation: Operation) -> Words:
    """What needs no more words: a heartbeat, a warm-up, the end."""
    return _with_groups(operation, ())


def encode_moves(moves: Sequence[tuple[int, int, int, int]]) -> Words:
    """Entries to be moved: of each its block and offset before and after."""
    return _with_groups(Operation.MOVE_ENTRIES, moves)


def decode_moves(words: Words) -> list[tuple[int, int, int, int]]:
    """What :func:`encode_moves` was given."""
    numbers = iter(words[2:].tolist())
    return list(zip(numbers, numbers, numbers, numbers, strict=True))


def encode_copies(copies: Sequence[tuple[int, int]], operation: Operation = Operation.COPY_BLOCKS) -> Words:
    """Blocks or states to be copied: of each the source and the target."""
    return _with_groups(operation, copies)


def decode_copies(words: Words) -> list[tuple[int, int]]:
    """What :func:`encode_copies` was given."""
    numbers = iter(words[2:].tolist())
    return list(zip(numbers, numbers, strict=True))


def encode_pass(batch: Batch, state_rows: Sequence[int], state_layers: Sequence[int]) -> Words:
    """A pass: its batch, and which hidden states it is to leave (empty: none)."""
    plan = batch.plan
    arrays = [
        plan.positions.numpy(),
        plan.slots.numpy(),
        batch.input_ids[0].cpu().numpy(),
        batch.logit_rows.numpy(),
        plan.row_starts.numpy(),
        plan.kv_lens.numpy(),
        plan.block_tables.numpy().ravel(),
        np.empty(0, np.int64) if plan.ancestors is None else plan.ancestors.numpy(),
        np.array(state_rows, np.int64),
        np.array(state_layers, np.int64),
        np.empty(0, np.int64) if batch.states is None else batch.states.numbers.numpy().ravel(),
    ]
    sizes = [len(array) for array in arrays]
    head = [2 + 3 + len(sizes) + sum(sizes), Operation.PASS, plan.max_kv_len, plan.max_rows, plan.block_size, *sizes]
    return np.concatenate((np.array(head, np.int64), *arrays), dtype=np.int64)


def decode_pass(words: Words) -> tuple[Batch, list[int], tuple[int, ...]]:
    """The batch of a pass, on the host, and its rows and layers of hidden states."""
    max_kv_len, max_rows, block_size = (int(word) for word in words[2:5])
    ends = accumulate(words[5:16].tolist(), initial=16)
    parts = [words[start:end] for start, end in pairwise(ends)]
    positions, slots, input_ids, logit_rows, row_starts, kv_lens, tables, ancestors, rows, layers, states = parts
    plan = BatchPlan(
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        row_starts=torch.from_numpy(row_starts.astype(np.int32)),
        block_tables=torch.from_numpy(tables.astype(np.int32).reshape(len(kv_lens), -1)),
        kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
        max_kv_len=max_kv_len,
        max_rows=max_rows,
        block_size=block_size,
        ancestors=torch.from_numpy(ancestors) if len(ancestors) else None,
    )
    batch = Batch(
        plan,
        torch.from_numpy(input_ids).unsqueeze(0),
        torch.from_numpy(logit_rows),
        row_starts.tolist(),
        kv_lens.tolist(),
        _state_plan(states.reshape(6, -1).tolist()) if len(states) else None,
    )
    return batch, rows.tolist(), tuple(layers.tolist())


def _state_plan(numbers: Sequence[Sequence[int]]) -> StatePlan:
    """From :attr:`StatePlan.numbers`."""
    slots, bases, starts, ends, new_bases, _ = numbers
    return StatePlan(slots, bases, starts, ends, new_bases, torch.device("cpu"))


def _with_groups(operation: Operation, groups: Sequence[Sequence[int]]) -> Words:
    numbers = [number for group in groups for number in group]
    return np.array([2 + len(numbers), operation, *numbers], dtype=np.int64)
