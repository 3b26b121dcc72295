"""From segments to one ragged batch: built on the host, where a small one costs microseconds, and moved in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_sequence import KVSequence
from engine.plan import BatchPlan
from engine.recurrent.plan import StatePlan
from engine.sampling.transfer import send
from specdec.errors import InvalidRequest
from specdec.tree_shape import MAX_SPECULATIVE_TOKENS
from specdec.trees import depths

#: Rows of a tree at most: 64 have a bit of :attr:`~engine.plan.BatchPlan.ancestors`, and nothing follows the
#: last one.
MAX_TREE_ROWS: Final = MAX_SPECULATIVE_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens to feed to one sequence in one forward pass."""

    sequence: KVSequence
    #: Fed after the ``sequence.length`` entries that are in the cache already. A tensor is int64 [n], on any device.
    token_ids: Sequence[int] | torch.Tensor
    #: Logits wanted for the last ``num_logits`` of these tokens; 0 for a prefill chunk that is not the last.
    num_logits: int
    #: Hidden states wanted for the last ``num_states`` of them, of these layers (see
    #: :class:`specdec.types.HiddenStates`).
    num_states: int = 0
    state_layers: tuple[int, ...] = ()
    #: Empty where each token follows the one before it; else for every token the index of the one it follows, which
    #: stands before it, or -1 for the entries in the cache. At most :data:`MAX_TREE_ROWS` tokens then, and only a leaf
    #: may be the last of so many.
    parents: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch, and as lists what kernels written in torch need to know of its shape."""

    plan: BatchPlan
    #: int64 [1, T]; on the device as soon as a segment brings ids that are.
    input_ids: torch.Tensor
    #: int64 [N]: rows whose logits are wanted.
    logit_rows: torch.Tensor
    #: First row of each sequence, then T.
    row_starts: list[int]
    #: Entries of each sequence once the batch is written.
    kv_lens: list[int]
    #: What it does to recurrent states; None: the model has none.
    states: StatePlan | None = None

    def to(self, device: torch.device) -> Batch:
        """The batch on a device: one copy from pinned memory, which the host does not wait for."""
        if device.type == "cpu":
            return self
        plan, num_rows, num_logits = self.plan, self.plan.num_rows, self.logit_rows.shape[0]
        ids = self.input_ids[0]
        host = [plan.positions, plan.slots, self.logit_rows, *([ids] if ids.device.type == "cpu" else [])]
        if plan.ancestors is not None:
            host.append(plan.ancestors)
        sizes = torch.cat((plan.row_starts, plan.kv_lens))
        numbers, sizes, tables = _move(torch.cat(host), sizes, plan.block_tables, device)
        moved = replace(
            plan,
            positions=numbers[:num_rows],
            slots=numbers[num_rows : 2 * num_rows],
            row_starts=sizes[: plan.num_sequences + 1],
            block_tables=tables,
            kv_lens=sizes[plan.num_sequences + 1 :],
            ancestors=None if plan.ancestors is None else numbers[-num_rows:],
        )
        rest = numbers[2 * num_rows :]
        ids = rest[num_logits : num_logits + num_rows] if ids.device.type == "cpu" else ids
        states = None if self.states is None else replace(self.states, device=device)
        return replace(self, plan=moved, input_ids=ids.unsqueeze(0), logit_rows=rest[:num_logits], states=states)


def build_batch(segments: Sequence[Segment], *, block_size: int, vocab_size: int, max_model_len: int) -> Batch:
    """Lay out the rows of the segments one after another, on the host.

    Raises:
        InvalidRequest: a token id is outside the vocabulary (checked where ids come as host integers: on a GPU such
            an id would take down the device), or a sequence outgrows the model.
        ValueError: a segment is empty, wants more logits than it has rows, is no tree, or outgrows its sequence's
            reservation or the model.
    """
    counts, starts = [], []
    for segment in segments:
        check_segment(segment, max_model_len)
        counts.append(len(segment.token_ids))
        starts.append(segment.sequence.length)
    num_sequences = len(counts)
    if len({id(segment.sequence) for segment in segments}) != num_sequences:
        raise ValueError("a sequence stands in two segments of one batch")
    row_starts = [0, *accumulate(counts)]
    kv_lens = [start + count for start, count in zip(starts, counts, strict=True)]
    tables = _block_tables(segments, kv_lens, block_size)

    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    ancestors: list[int] = []
    for index, segment in enumerate(segments):
        start, end, last_row = starts[index], kv_lens[index], row_starts[index + 1]
        position = start + segment.sequence.num_dropped
        if segment.parents:
            steps, bits = _tree(segment.parents)
            positions += [position + step for step in steps]
            ancestors += bits
        else:
            positions += range(position, position + counts[index])
            ancestors += [-1] * counts[index]
        logit_rows += range(last_row - segment.num_logits, last_row)
        table = tables[index]
        while start < end:  # one run per block
            block, offset = divmod(start, block_size)
            first = int(table[block]) * block_size + offset
            run = min(block_size - offset, end - start)
            slots += range(first, first + run)
            start += run
    token_ids = _host_ids(segments, vocab_size)
    num_rows = len(positions)

    numbers = torch.tensor(positions + slots + logit_rows + (token_ids or []), dtype=torch.int64)
    sizes = torch.tensor(row_starts + kv_lens, dtype=torch.int32)
    plan = BatchPlan(
        positions=numbers[:num_rows],
        slots=numbers[num_rows : 2 * num_rows],
        row_starts=sizes[: num_sequences + 1],
        block_tables=torch.from_numpy(tables),
        kv_lens=sizes[num_sequences + 1 :],
        max_kv_len=max(kv_lens),
        max_rows=max(counts),
        block_size=block_size,
        ancestors=torch.tensor(ancestors) if any(segment.parents for segment in segments) else None,
    )
    rest = numbers[2 * num_rows :]
    ids = rest[len(logit_rows) :] if token_ids is not None else _given_ids(segments)
    states = _state_plan(segments, starts, kv_lens)
    return Batch(plan, ids.unsqueeze(0), rest[: len(logit_rows)], row_starts, kv_lens, states)


def check_segment(segment: Segment, max_model_len: int) -> None:
    """Raise what :func:`build_batch` raises of a segment by itself."""
    count, length, parents = len(segment.token_ids), segment.sequence.length, segment.parents
    if not 0 <= segment.num_logits <= count or count == 0:
        raise ValueError(f"a segment of {count} tokens cannot give {segment.num_logits} rows of logits")
    longest = count
    if parents:
        if segment.sequence.states is not None:
            raise ValueError("the model has recurrent states, which follow a chain of tokens and no tree")
        if len(parents) != count or count > MAX_TREE_ROWS or MAX_TREE_ROWS - 1 in parents:
            raise ValueError(
                f"a tree of {count} tokens with {len(parents)} parents; at most {MAX_TREE_ROWS - 1} may have children"
            )
        for index, parent in enumerate(parents):
            if not -1 <= parent < index:
                raise ValueError(f"parents[{index}] is {parent}; a parent stands before its child, or is -1")
        longest = max(depths(parents)) + 1
    if length + count > segment.sequence.capacity or length + longest > max_model_len:
        raise ValueError(
            f"{length} entries and {count} tokens exceed the {segment.sequence.capacity} the sequence has room"
            f" for (the model takes {max_model_len})"
        )


def _state_plan(segments: Sequence[Segment], starts: Sequence[int], ends: Sequence[int]) -> StatePlan | None:
    """What the pass does to the recurrent states; those of a released sequence go to slot 0."""
    slots = [segment.sequence.states for segment in segments]
    kept = [slot for slot in slots if slot is not None]
    if not kept:
        return None
    bases = [slot.bases(start, end - start) for slot, start, end in zip(kept, starts, ends, strict=True)]
    return StatePlan(
        slots=[slot.index for slot in kept],
        bases=[base for base, _ in bases],
        starts=starts,
        ends=ends,
        new_bases=[new_base for _, new_base in bases],
        device=torch.device("cpu"),
    )


def _tree(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depths and :attr:`~engine.plan.BatchPlan.ancestors` of a tree's rows."""
    bits: list[int] = []
    for index, parent in enumerate(parents):
        own = (1 << index) & (2**64 - 1)
        bits.append((0 if parent < 0 else bits[parent]) | own)
    return depths(parents), [value - 2**64 if value >= 2**63 else value for value in bits]


def _block_tables(segments: Sequence[Segment], kv_lens: Sequence[int], block_size: int) -> npt.NDArray[np.int32]:
    """Block tables [S, B], padded with block 0; all of a released sequence's rows go there."""
    num_blocks = -(-max(kv_lens) // block_size)
    if len(segments) == 1 and not segments[0].sequence.released:
        return segments[0].sequence.blocks[None, :num_blocks]  # never written to in place
    tables = np.zeros((len(segments), num_blocks), dtype=np.int32)
    for table, segment, kv_len in zip(tables, segments, kv_lens, strict=True):
        if not segment.sequence.released:
            used = -(-kv_len // block_size)
            table[:used] = segment.sequence.blocks[:used]
    return tables


def _host_ids(segments: Sequence[Segment], vocab_size: int) -> list[int] | None:
    """All token ids; None where a segment brings a tensor."""
    token_ids: list[int] = []
    for segment in segments:
        if isinstance(segment.token_ids, torch.Tensor):
            return None
        token_ids += segment.token_ids
    smallest, largest = min(token_ids), max(token_ids)
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size} tokens", param="token_ids")
    return token_ids


def _given_ids(segments: Sequence[Segment]) -> torch.Tensor:
    """All token ids where some are tensors, int64 [T], on the tensors' device; nothing waits for those."""
    given = [segment.token_ids for segment in segments]
    device = next(ids.device for ids in given if isinstance(ids, torch.Tensor))
    pieces = [ids if isinstance(ids, torch.Tensor) else torch.tensor(ids, dtype=torch.int64) for ids in given]
    return torch.cat([piece if piece.device == device else send(piece, device) for piece in pieces])


def _move(
    numbers: torch.Tensor, sizes: torch.Tensor, blocks: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring int64 and int32 tensors to a GPU in one copy from pinned memory, which the host does not wait for."""
    count = numbers.shape[0]
    packed = torch.empty(count + (sizes.numel() + blocks.numel() + 1) // 2, dtype=torch.int64, pin_memory=True)
    packed[:count] = numbers
    packed[count:].view(torch.int32)[: sizes.numel() + blocks.numel()] = torch.cat((sizes, blocks.flatten()))
    moved = packed.to(device, non_blocking=True)
    tail = moved[count:].view(torch.int32)
    return moved[:count], tail[: sizes.numel()], tail[sizes.numel() :][: blocks.numel()].view(blocks.shape)
