"""From segments to one ragged batch: built in numpy in one buffer, so that it reaches the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.kv_pool import KVSequence
from specdec.engine.plan import BatchPlan
from specdec.errors import InvalidRequest

A = TypeVar("A", npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[Any], torch.Tensor)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to feed to one sequence in one forward pass."""

    sequence: KVSequence
    #: Fed after the ``sequence.length`` entries that are in the cache already. A tensor is int64 [n], on any device.
    token_ids: Sequence[int] | torch.Tensor
    #: Logits wanted for the last ``num_logits`` of these tokens; 0 for a prefill chunk that is not the last.
    num_logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch on the device, and on the host what kernels written in torch need to know of its shape."""

    plan: BatchPlan
    #: int64 [1, T].
    input_ids: torch.Tensor
    #: int64 [N]: rows whose logits are wanted.
    logit_rows: torch.Tensor
    #: First row of each sequence, then T.
    row_starts: list[int]
    #: Entries of each sequence once the batch is written.
    kv_lens: list[int]


def build_batch(
    segments: Sequence[Segment], *, block_size: int, vocab_size: int, max_model_len: int, device: torch.device
) -> Batch:
    """Lay out the rows of the segments one after another.

    Raises:
        InvalidRequest: a token id is outside the vocabulary (checked where ids come as host integers: on a GPU such
            an id would take down the device), or a sequence outgrows the model.
        ValueError: a segment is empty, wants more logits than it has rows, or outgrows its sequence's reservation.
    """
    counts, starts = [], []
    for segment in segments:
        count, length = len(segment.token_ids), segment.sequence.length
        if not 0 <= segment.num_logits <= count or count == 0:
            raise ValueError(f"a segment of {count} tokens cannot give {segment.num_logits} rows of logits")
        if length + count > min(segment.sequence.max_tokens, max_model_len):
            raise ValueError(
                f"{length} entries and {count} tokens exceed the {segment.sequence.max_tokens} the sequence has room"
                f" for (the model takes {max_model_len})"
            )
        counts.append(count)
        starts.append(length)
    num_sequences = len(counts)
    if len({id(segment.sequence) for segment in segments}) != num_sequences:
        raise ValueError("a sequence stands in two segments of one batch")
    row_starts = [0, *accumulate(counts)]
    kv_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    num_rows, max_kv_len = row_starts[-1], max(kv_lens)
    num_blocks = -(-max_kv_len // block_size)
    num_logits = sum(segment.num_logits for segment in segments)

    sizes64 = (num_rows, num_rows, num_rows, num_logits)
    sizes32 = (num_sequences + 1, num_sequences * num_blocks, num_sequences)
    buffer = _Buffer(sizes64, sizes32, device)
    positions, slots, input_ids, logit_rows = buffer.int64
    starts32, tables, lens32 = buffer.int32

    tables = tables.reshape(num_sequences, num_blocks)
    _fill_tables(tables, segments, kv_lens, block_size)
    if num_sequences == 1:
        positions[:] = np.arange(starts[0], max_kv_len)
        blocks = tables[0, positions // block_size]
        logit_rows[:] = np.arange(num_rows - num_logits, num_rows)
    else:
        owner = np.repeat(np.arange(num_sequences), counts)
        shift = np.array(starts) - np.array(row_starts[:-1])
        np.add(np.arange(num_rows), shift[owner], out=positions)
        blocks = tables[owner, positions // block_size]
        wanted = [segment.num_logits for segment in segments]
        ends = np.array(row_starts[1:]) - np.cumsum(wanted)
        np.add(np.arange(num_logits), np.repeat(ends, wanted), out=logit_rows)
    np.add(np.multiply(blocks, block_size, dtype=np.int64), positions % block_size, out=slots)
    starts32[:] = row_starts
    lens32[:] = kv_lens

    ids = _fill_ids(segments, input_ids, vocab_size)
    (positions_t, slots_t, ids_t, logit_rows_t), (starts_t, tables_t, lens_t) = buffer.to_device()
    plan = BatchPlan(
        positions=positions_t,
        slots=slots_t,
        row_starts=starts_t,
        block_tables=tables_t.view(num_sequences, num_blocks),
        kv_lens=lens_t,
        max_kv_len=max_kv_len,
        max_rows=max(counts),
        block_size=block_size,
    )
    ids_t = ids_t if ids is None else ids.to(device, non_blocking=True)
    return Batch(plan, ids_t.unsqueeze(0), logit_rows_t, row_starts, kv_lens)


def _fill_tables(
    tables: npt.NDArray[np.int32], segments: Sequence[Segment], kv_lens: Sequence[int], block_size: int
) -> None:
    """Block tables [S, B], padded with block 0; all of a released sequence's rows go there."""
    tables[:] = 0
    for table, segment, kv_len in zip(tables, segments, kv_lens, strict=True):
        if not segment.sequence.released:
            used = -(-kv_len // block_size)
            table[:used] = segment.sequence.blocks[:used]


def _fill_ids(segments: Sequence[Segment], out: npt.NDArray[np.int64], vocab_size: int) -> torch.Tensor | None:
    """Write host token ids to ``out``; where any segment brings a tensor, return all ids as one tensor instead."""
    if any(isinstance(segment.token_ids, torch.Tensor) for segment in segments):
        device = next(s.token_ids.device for s in segments if isinstance(s.token_ids, torch.Tensor))
        return torch.cat([torch.as_tensor(s.token_ids, dtype=torch.int64, device=device) for s in segments])
    row = 0
    for segment in segments:
        count = len(segment.token_ids)
        out[row : row + count] = segment.token_ids
        row += count
    if int(out.min()) < 0 or int(out.max()) >= vocab_size:
        wrong = int(out.min()) if int(out.min()) < 0 else int(out.max())
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens", param="token_ids")
    return None


class _Buffer:
    """int64 and int32 arrays carved out of one allocation (pinned where it must reach a GPU)."""

    def __init__(self, sizes64: tuple[int, ...], sizes32: tuple[int, ...], device: torch.device) -> None:
        self._sizes64, self._sizes32, self._device = sizes64, sizes32, device
        total = sum(sizes64) + (sum(sizes32) + 1) // 2
        self._host = torch.empty(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        whole = self._host.numpy()
        self.int64 = _carve(whole, sizes64)
        self.int32 = _carve(whole[sum(sizes64) :].view(np.int32), sizes32)

    def to_device(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The same arrays as tensors on the device; one copy, which the host does not wait for."""
        whole = self._host if self._device.type == "cpu" else self._host.to(self._device, non_blocking=True)
        return (
            _carve(whole, self._sizes64),
            _carve(whole[sum(self._sizes64) :].view(torch.int32), self._sizes32),
        )


def _carve(whole: A, sizes: tuple[int, ...]) -> list[A]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(whole[start : start + size])
        start += size
    return pieces
