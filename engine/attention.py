"""Attention over the paged cache, written in torch: the reference, and the path where no kernels can be had.

Every sequence's keys and values are gathered through its block table into padded batches of sequences of similar
size, then go through scaled dot product attention with a mask. Kernels that work on the cache in place (the native ones
on a CPU, Triton's on a GPU) replace it where they can be had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.batch import Batch
from engine.plan import BatchPlan
from engine.recurrent.kernels import RecurrentKernels


class AttentionKernels(Protocol):
    """Kernels that write and read the cache in place.

    The modules :mod:`engine.native.attention` and :mod:`engine.cuda.attention` are such.
    """

    @property
    def KNOWS_SINKS(self) -> bool:
        """Whether ``sinks`` may be given."""
        ...

    @property
    def RECURRENCES(self) -> RecurrentKernels | None:
        """Kernels of the same device for recurrent layers; None: those run in torch."""
        ...

    def paged_attention(  # noqa: PLR0917 - an operator's signature
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        plan: BatchPlan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :func:`paged_attention` below."""
        ...

    def write_kv(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BatchPlan
    ) -> None:
        """As :func:`write_kv` below."""
        ...

    def move_entries(self, caches: Sequence[torch.Tensor], moves: Sequence[tuple[int, int, int, int]]) -> None:
        """As :func:`engine.compaction.move_entries`; entries move to the front, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of similar size (within 2x in rows and in blocks), attended to as one padded batch."""

    #: int64 [S, R]: rows of each sequence; shorter ones repeat their last row.
    rows: torch.Tensor
    #: int64 [S, B]: blocks of each sequence, padded with 0.
    tables: torch.Tensor
    #: int64 [S, R]: positions of the rows.
    positions: torch.Tensor
    #: int64 [S, 1]: the last entry of each sequence.
    last_entries: torch.Tensor
    kv_lens: list[int]
    #: First and last + 1 row of a group of one sequence, else None.
    span: tuple[int, int] | None


@dataclass(slots=True)
class PagedBatch:
    """A batch with what the torch kernel derives from it once for all layers."""

    batch: Batch
    _groups: list[Group] | None = None
    _masks: dict[tuple[int, int | None, int], torch.Tensor | None] = field(default_factory=dict)
    _slots: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] each: block and offset in the block of every row's own entry."""
        if self._slots is None:
            plan = self.batch.plan
            self._slots = (plan.slots // plan.block_size, plan.slots % plan.block_size)
        return self._slots

    @property
    def groups(self) -> list[Group]:
        """The batch cut into groups."""
        if self._groups is None:
            self._groups = _group(self.batch)
        return self._groups

    def mask(self, index: int, window: int | None, repeats: int) -> torch.Tensor | None:
        """Bool [S, 1, repeats * R, L], True where a row may look; None where all may look everywhere."""
        key = (index, window, repeats)
        if key not in self._masks:
            mask = _mask(self.groups[index], self.batch.plan, window)
            self._masks[key] = None if mask is None else mask.repeat(1, 1, repeats, 1)
        return self._masks[key]


def write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch
) -> None:
    """Put every row's key [T, Hkv, D] and value [T, Hkv, Dv] into its slot."""
    blocks, offsets = batch.slots
    k_cache[blocks, :, offsets] = key
    v_cache[blocks, :, offsets] = value


def paged_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every row to the cached entries of its sequence and to its ancestors (in a chain: the rows before it).

    query [T, Hq, D]; k_cache [N, Hkv, block, D]; v_cache [N, Hkv, block, Dv]; sinks [Hq] or None. Returns
    [T, Hq, Dv]. ``window`` counts the entries a row sees, itself included.
    """
    num_heads, num_kv_heads, value_dim = query.shape[1], k_cache.shape[1], v_cache.shape[-1]
    shared = num_heads // num_kv_heads  # query heads that share a key head: as further rows, keys are not repeated
    out = query.new_empty(query.shape[0], num_heads, value_dim)
    for index, group in enumerate(batch.groups):
        keys, values = _gather(k_cache, group), _gather(v_cache, group)  # [S, Hkv, L, D], [S, Hkv, L, Dv]
        mask = batch.mask(index, window, shared)
        rows = query[group.rows] if group.span is None else query[None, slice(*group.span)]  # [S, R, Hq, D]
        num_sequences, num_rows = rows.shape[:2]
        rows = rows.transpose(1, 2).reshape(num_sequences, num_kv_heads, shared * num_rows, -1)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
        else:
            attended = _attend_by_hand(rows, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
        attended = attended.reshape(num_sequences, num_heads, num_rows, value_dim).transpose(1, 2)  # [S, R, Hq, Dv]
        if group.span is None:
            out[group.rows] = attended  # a repeated row is written twice with one value
        else:
            out[slice(*group.span)] = attended[0]
    return out


def _attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What SDPA has no argument for: softcap * tanh(scores / softcap), and a sink that takes part of the softmax.

    query [S, Hkv, G * R, D], where G query heads share a key head; sinks [Hkv * G].
    """
    scores = torch.matmul(query, keys.transpose(2, 3)).float() * scale  # [S, Hkv, G * R, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        num_sequences, num_kv_heads, num_rows, _ = scores.shape
        column = sinks.float().view(1, num_kv_heads, -1, 1)
        column = column.repeat_interleave(num_rows // column.shape[2], dim=2).expand(num_sequences, -1, -1, -1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(values.dtype), values)


def _gather(cache: torch.Tensor, group: Group) -> torch.Tensor:
    """[S, H, L, D] of a group: exact for one sequence, else padded to whole blocks, the padding zeroed.

    Unwritten entries may hold anything, NaN included, and a mask does not stop NaN.
    """
    num_sequences, num_blocks = group.tables.shape
    _, num_heads, block_size, dim = cache.shape
    if group.span is not None:
        entries = cache[group.tables[0]].transpose(0, 1).reshape(1, num_heads, num_blocks * block_size, dim)
        return entries[:, :, : group.kv_lens[0]]
    entries = cache[group.tables].transpose(1, 2).reshape(num_sequences, num_heads, num_blocks * block_size, dim)
    unwritten = torch.arange(entries.shape[2], device=cache.device) > group.last_entries  # [S, L]
    return entries.masked_fill_(unwritten[:, None, :, None], 0)


def _mask(group: Group, plan: BatchPlan, window: int | None) -> torch.Tensor | None:
    """Bool [S, 1, R, L]."""
    num_entries = group.kv_lens[0] if group.span is not None else group.tables.shape[1] * plan.block_size
    one_row = group.span is not None and group.span[1] - group.span[0] == 1
    if one_row and (window is None or num_entries <= window):
        return None
    entry = torch.arange(num_entries, device=group.positions.device)
    if plan.ancestors is not None:
        return _tree_mask(group, plan, entry, window)
    own = _own_entries(group)[1][:, None, :, None]  # [S, 1, R, 1]
    mask = entry <= own
    return mask if window is None else mask & (entry > own - window)


def _own_entries(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [S, R] each: the rows, and their own entries."""
    device = group.last_entries.device
    rows = group.rows if group.span is None else torch.arange(*group.span, device=device)[None]
    return rows, group.last_entries - rows[:, -1:] + rows


def _tree_mask(group: Group, plan: BatchPlan, entry: torch.Tensor, window: int | None) -> torch.Tensor:
    """Bool [S, 1, R, L]: the cached entries, and those of the rows that are ancestors. entry int64 [L]."""
    assert plan.ancestors is not None
    rows, own = _own_entries(group)
    row = entry - own[:, :1]  # [S, L]: the entry's row among those of the sequence, negative where it was cached
    bits = plan.ancestors[rows][:, :, None] >> row.clamp(0, 63)[:, None]  # [S, R, L]
    mask = (row < 0)[:, None] | (entry <= own[:, :, None]) & ((bits & 1 == 1) | (row > 63)[:, None])
    if window is not None:
        written = plan.positions[(rows[:, :1] + row).clamp(0, plan.num_rows - 1)]
        mask &= torch.where(row < 0, entry, written)[:, None] > group.positions[:, :, None] - window
    return mask[:, None]


def _group(batch: Batch) -> list[Group]:
    """Cut the batch into groups; built on the host, moved in one copy each."""
    plan, starts, lens = batch.plan, batch.row_starts, batch.kv_lens
    buckets: dict[tuple[int, int], list[int]] = {}
    for index, kv_len in enumerate(lens):
        num_blocks = -(-kv_len // plan.block_size)
        size = ((starts[index + 1] - starts[index]).bit_length(), num_blocks.bit_length())
        buckets.setdefault(size, []).append(index)
    groups = []
    for members in buckets.values():
        num_blocks = -(-max(lens[index] for index in members) // plan.block_size)
        if len(members) == 1:
            index = members[0]
            first, last = starts[index], starts[index + 1]
            tables = plan.block_tables[index : index + 1, :num_blocks].long()
            rows = torch.empty(0, dtype=torch.int64)
            last_entry = plan.kv_lens[index : index + 1, None].long() - 1
            positions = plan.positions[None, first:last]
            groups.append(Group(rows, tables, positions, last_entry, [lens[index]], (first, last)))
            continue
        num_rows = max(starts[index + 1] - starts[index] for index in members)
        host = [[min(starts[i] + row, starts[i + 1] - 1) for row in range(num_rows)] + [i] for i in members]
        moved = torch.tensor(host, dtype=torch.int64, pin_memory=plan.positions.is_cuda).to(
            plan.positions.device, non_blocking=True
        )
        rows, owners = moved[:, :-1], moved[:, -1]
        tables = plan.block_tables[owners, :num_blocks].long()
        last_entries = plan.kv_lens[owners, None].long() - 1
        kv_lens = [lens[index] for index in members]
        groups.append(Group(rows, tables, plan.positions[rows], last_entries, kv_lens, None))
    return groups
