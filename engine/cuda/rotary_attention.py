"""Attention with what stands around it, in one launch: norms and rotary positions of queries and keys, the cache's new
entries, and in e4m3 the rounding of the result.

The last program of a tile does what all must have ended for. Programs count themselves, in numbers of a thread: its
launches run one after another, and each leaves zeros. ``joins`` False leaves that to launches of their own.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.cuda import kernels, rotary_kernels
from engine.cuda.attention import MAX_SPLITS, NUM_STAGES, Launch, padded_size, programs_of
from engine.cuda.float8 import Float8Rows, empty_rows, launch_rounding
from engine.plan import BatchPlan

#: Numbers of rows that are rounded together.
_ROUNDED_NUMBERS: Final = 4096
#: Rows that a program rotates together, where a tile is large; a round has few.
_TILE_FED: Final = 32
#: Numbers of the parts that the last program of a tile reads together, 64 for each thread.
_JOINED_NUMBERS: Final = 8192
#: Of a thread at first: more than 8,192 rows of 8 key heads need.
_COUNTERS: Final = 2**17


class _Counters(threading.local):
    """Zeros, by device; graphs read the earlier ones, too."""

    def __init__(self) -> None:
        self.of: dict[torch.device, list[Tensor]] = {}


_counters: Final = _Counters()


class Around(NamedTuple):
    """What a layer has around its attention."""

    #: [T, D] each.
    cosines: Tensor
    sines: Tensor
    #: Weights of the norms of queries and keys [D]; None: there are none.
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float
    #: Numbers that are rounded together, of the result; None: it is not rounded.
    rounded_group: int | None = None


def rotary_attention(  # noqa: PLR0917
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: BatchPlan,
    around: Around,
    scale: float,
    window: int | None = None,
    *,
    joins: bool = True,
) -> Tensor | Float8Rows:
    """:func:`~engine.cuda.attention.paged_attention` of rows [T, Hq + 2 Hkv, D] whose keys and values it rotates and
    writes first. Returns [T, Hq · D], or that rounded. Nothing waits for the device.
    """
    num_rows, num_all_heads, dim = qkv.shape
    num_kv_heads = k_cache.shape[1]
    num_heads = num_all_heads - 2 * num_kv_heads
    padded = max(padded_size(dim), 16)
    launch = Launch.of(
        plan,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=padded,
        itemsize=qkv.itemsize,
        num_programs=programs_of(qkv.device),
    )
    group = around.rounded_group if joins else None
    out = qkv.new_empty(num_rows, num_heads * dim)
    rounded = Float8Rows(out, out) if group is None else empty_rows(out, num_heads * dim, group)
    is_split = launch.num_splits > 1
    parts = part_max = part_sum = out
    if is_split:
        parts = qkv.new_empty(num_rows * num_heads, launch.num_splits, dim, dtype=torch.float32)
        part_max, part_sum = qkv.new_empty(2, num_rows * num_heads, launch.num_splits, dtype=torch.float32)
    num_tiles = num_rows // launch.tile_rows + plan.num_sequences
    padded_rows = padded_size(launch.tile_rows)
    chunk = min(max(_ROUNDED_NUMBERS // padded_rows, group or 1), padded_size(num_heads * dim))
    rotary_kernels.rotate_attend[(num_tiles, num_kv_heads, launch.num_splits)](
        qkv,
        around.cosines,
        around.sines,
        qkv if around.query_norm is None else around.query_norm,
        qkv if around.key_norm is None else around.key_norm,
        k_cache,
        v_cache,
        out,
        parts,
        part_max,
        part_sum,
        _zeros(qkv.device, num_tiles * (num_kv_heads + 1)),
        *rounded,
        plan.row_starts,
        plan.kv_lens,
        plan.block_tables,
        plan.positions,
        plan.positions if plan.ancestors is None else plan.ancestors,
        plan.slots,
        around.eps,
        float(scale),
        rounded.scales.stride(1),
        plan.num_sequences,
        plan.block_tables.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HALF=dim // 2,
        PADDED_DIM=padded,
        BLOCK_SIZE=plan.block_size,
        WINDOW=window or 0,
        HAS_NORMS=around.query_norm is not None,
        HAS_TREES=plan.ancestors is not None,
        IS_SPLIT=is_split,
        JOINS=joins,
        ROUNDED_GROUP=group or 0,
        ROUNDED_CHUNK=padded_size(chunk) if group == num_heads * dim else max(chunk, group or 1),
        PADDED_ROWS=padded_rows,
        TILE_ROWS=launch.tile_rows,
        TILE_M=launch.tile_m,
        TILE_N=launch.tile_n,
        TILE_FED=_TILE_FED if launch.tile_m > 32 else 16,
        CHUNK=max(1, _JOINED_NUMBERS // (launch.tile_m * padded)),
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    if group is not None:
        return rounded
    if is_split and not joins:
        kernels.join[(num_rows * num_heads,)](
            out,
            parts,
            part_max,
            part_sum,
            launch.num_splits,
            VALUE_DIM=dim,
            PADDED_VALUE_DIM=padded,
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )
    return out if around.rounded_group is None else launch_rounding(out, around.rounded_group)


class RotaryKernels:
    """The same as kernels for attention alone, for :mod:`engine.loading.kernel_check`: rows are rotated by nothing."""

    KNOWS_SINKS: Final = False
    RECURRENCES: Final = None

    def __init__(self, *, joins: bool) -> None:
        self._joins = joins
        self._written: tuple[Tensor, ...] = ()

    def write_kv(self, k_cache: Tensor, v_cache: Tensor, key: Tensor, value: Tensor, plan: BatchPlan) -> None:
        """Left to the launch that follows."""
        self._written = key, value

    def paged_attention(  # noqa: PLR0917
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, plan: BatchPlan, scale: float, window: int | None = None
    ) -> Tensor:
        """As :func:`engine.cuda.attention.paged_attention` after ``write_kv``."""
        ones = query.new_ones(len(query), query.shape[2])
        around = Around(ones, torch.zeros_like(ones), None, None, 0.0)
        qkv = torch.cat([query, *self._written], 1)
        out = rotary_attention(qkv, k_cache, v_cache, plan, around, scale, window, joins=self._joins)
        assert isinstance(out, Tensor)
        return out.view(query.shape)


def _zeros(device: torch.device, count: int) -> Tensor:
    """int32 [count or more]."""
    kept = _counters.of.setdefault(device, [])
    if not kept or len(kept[-1]) < count:
        kept.append(torch.zeros(max(count, _COUNTERS), dtype=torch.int32, device=device))
    return kept[-1]
