"""Attention over the paged cache in Triton: ragged rows, the cache read in place through the block tables.

A launch depends on nothing but the number of rows and sequences, the longest kv_len a plan allows and the layer's
shape; lengths and tables are read on the device. So a launch that was captured in a CUDA graph stays right whatever
lengths the next batch has. Sequences without rows are skipped; rows of a sequence with kv_len 0 (padding) come out 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
import triton.language as tl

from engine.cuda import kernels
from engine.plan import BatchPlan
from engine.sampling.transfer import send

KNOWS_SINKS: Final = True
RECURRENCES: Final = None

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
#: Programs per multiprocessor that a launch should have before entries are no longer split.
_WAVES: Final = 4
#: Parts a sequence's entries are split into, at most.
MAX_SPLITS: Final = 64
#: Tiles of entries on their way at a time.
NUM_STAGES: Final = 3
_MULTIPROCESSORS_WITHOUT_A_GPU: Final = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """How one attention call is cut into programs."""

    #: Row-heads of a tile, a power of two, and the whole rows among them.
    tile_m: int
    tile_rows: int
    #: Entries looked at together.
    tile_n: int
    #: Parts the entries of a sequence are split into, a power of two.
    num_splits: int

    @classmethod
    def of(
        cls, plan: BatchPlan, *, num_heads: int, num_kv_heads: int, dim: int, itemsize: int, num_programs: int
    ) -> Launch:
        """Tiles that hold the rows of most sequences, split until there are ``num_programs`` programs.

        ``dim`` is the larger of the padded sizes of a head. Tiles are as large as registers allow: products of float32
        are not made by tensor cores, and take more.
        """
        group = num_heads // num_kv_heads
        num_rows = min(plan.max_rows, -(-2 * plan.num_rows // plan.num_sequences))
        tile_m = max(min(padded_size(num_rows * group), 64 if itemsize == 2 else 16), padded_size(group), 16)
        tile_rows = tile_m // group
        tile_n = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 1024 else 16
        num_tiles = max(-(-plan.num_rows // tile_rows), plan.num_sequences)
        useful = min(MAX_SPLITS, -(-plan.max_kv_len // tile_n))
        num_splits = min(padded_size(max(num_programs // (num_tiles * num_kv_heads), 1)), padded_size(useful))
        return cls(tile_m, tile_rows, tile_n, num_splits)


def paged_attention(  # noqa: PLR0917 - an operator's signature
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_programs: int | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every row to the cached entries of its sequence and to its ancestors (in a chain: the rows before it).

    query [T, Hq, D] (any strides over rows and heads); k_cache [N, Hkv, block, D]; v_cache [N, Hkv, block, Dv]; all of
    one dtype of :data:`DTYPES`; softmax and sums are float32. ``window`` counts the entries a row sees, itself
    included. Scores are ``query · key * scale``, then ``softcap * tanh(scores / softcap)`` where given; ``sinks`` [Hq]
    take part in the softmax without a value. ``num_programs`` is how many programs there should be at least (None:
    what fills the device). Returns [T, Hq, Dv]. Nothing waits for the device.

    Raises:
        NotImplementedError: a dtype or layout the kernel does not know.
    """
    if query.dtype not in DTYPES or not query.dtype == k_cache.dtype == v_cache.dtype:
        raise NotImplementedError(f"attention of {query.dtype} rows over {k_cache.dtype} and {v_cache.dtype} caches")
    _check_cache(k_cache)
    _check_cache(v_cache)
    if query.stride(2) != 1:
        query = query.contiguous()
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, value_dim = k_cache.shape[1], v_cache.shape[3]
    padded = max(padded_size(head_dim), 16), max(padded_size(value_dim), 16)
    launch = Launch.of(
        plan,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dim=max(padded),
        itemsize=query.itemsize,
        num_programs=programs_of(query.device) if num_programs is None else num_programs,
    )
    out = query.new_empty(num_rows, num_heads, value_dim)
    is_split = launch.num_splits > 1
    parts = part_max = part_sum = out
    if is_split:
        parts = query.new_empty(num_rows * num_heads, launch.num_splits, value_dim, dtype=torch.float32)
        part_max, part_sum = query.new_empty(2, num_rows * num_heads, launch.num_splits, dtype=torch.float32)
    grid = (num_rows // launch.tile_rows + plan.num_sequences, num_kv_heads, launch.num_splits)
    kernels.attend[grid](
        query,
        k_cache,
        v_cache,
        parts,
        part_max,
        part_sum,
        plan.row_starts,
        plan.kv_lens,
        plan.block_tables,
        plan.positions,
        plan.positions if plan.ancestors is None else plan.ancestors,
        query if sinks is None else sinks,
        float(scale),
        float(softcap or 1.0),
        plan.num_sequences,
        plan.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PADDED_HEAD_DIM=padded[0],
        PADDED_VALUE_DIM=padded[1],
        BLOCK_SIZE=plan.block_size,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        HAS_TREES=plan.ancestors is not None,
        IS_SPLIT=is_split,
        TILE_ROWS=launch.tile_rows,
        TILE_M=launch.tile_m,
        TILE_N=launch.tile_n,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    if is_split:
        kernels.join[(num_rows * num_heads,)](
            out,
            parts,
            part_max,
            part_sum,
            launch.num_splits,
            VALUE_DIM=value_dim,
            PADDED_VALUE_DIM=padded[1],
            MAX_SPLITS=MAX_SPLITS,
            num_warps=4,
        )
    return out


def write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BatchPlan
) -> None:
    """Put every row's key [T, Hkv, D] and value [T, Hkv, Dv] into its slot.

    Raises:
        NotImplementedError: blocks of a cache are not contiguous.
    """
    _check_cache(k_cache)
    _check_cache(v_cache)
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    num_rows, num_kv_heads, head_dim = key.shape
    value_dim = value.shape[2]
    kernels.write[(num_rows,)](
        key,
        value,
        k_cache,
        v_cache,
        plan.slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        k_cache.stride(0),
        v_cache.stride(0),
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        PADDED_KV_HEADS=padded_size(num_kv_heads),
        PADDED_HEAD_DIM=padded_size(head_dim),
        PADDED_VALUE_DIM=padded_size(value_dim),
        BLOCK_SIZE=plan.block_size,
        num_warps=4,
    )


_NUMBERS: Final = {2: tl.int16, 4: tl.int32}


def move_entries(caches: Sequence[torch.Tensor], moves: Sequence[tuple[int, int, int, int]]) -> None:
    """Move entries of all caches [num_blocks, H, block_size, D], in a launch for each shape of them.

    A move is the block and offset an entry comes from, then those it goes to. No move may write what a later one
    reads, as it is where entries move to the front, in order.
    """
    device = caches[0].device
    places = send([*zip(*moves, strict=True)], device)  # [4, moves]
    for alike in _by_shape(caches):
        _, num_heads, block_size, dim = alike[0].shape
        addresses = _addresses(tuple(cache.data_ptr() for cache in alike), device)
        kernels.move[(len(alike), num_heads)](
            places,
            addresses,
            len(moves),
            alike[0].stride(0),
            DIM=dim,
            PADDED_DIM=padded_size(dim),
            BLOCK_SIZE=block_size,
            NUMBER=_NUMBERS[alike[0].itemsize],
            num_warps=1,
        )


def _by_shape(caches: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Caches that one launch can handle."""
    found: dict[object, list[torch.Tensor]] = {}
    for cache in caches:
        _check_cache(cache)
        found.setdefault((cache.shape[1:], cache.itemsize, cache.stride(0)), []).append(cache)
    return found.values()


@lru_cache(maxsize=16)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [n] on the device."""
    return send(addresses, device, torch.int64)


def padded_size(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


@lru_cache
def programs_of(device: torch.device) -> int:
    """Programs that fill a device."""
    if device.type != "cuda":
        return _WAVES * _MULTIPROCESSORS_WITHOUT_A_GPU
    return _WAVES * int(torch.cuda.get_device_properties(device).multi_processor_count)


def _check_cache(cache: torch.Tensor) -> None:
    _, _, block_size, dim = cache.shape
    if cache.stride()[1:] != (block_size * dim, dim, 1):
        raise NotImplementedError(f"a cache with strides {cache.stride()}; blocks must be contiguous")
