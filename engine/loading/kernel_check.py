"""The check of attention kernels at load: random entries of a model's own shapes, each row against torch in float32.

A model's check (:mod:`engine.loading.self_check`) sees attention through a whole forward pass. There half precision
hides small faults, a token may be sent to another expert, and not every model can be given a long text. Here no row may
be wrong: not in a tree of the largest size, after a text that kernels split into parts, in a chunk of a prompt, or
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import torch

from engine.attention import AttentionKernels, PagedBatch, paged_attention, write_kv
from engine.batch import MAX_TREE_ROWS, Segment, build_batch
from engine.kv_pool import KVPool
from engine.layers import LayerShape, allocate_caches

#: Distance of a row of one head from torch's, relative to that row: a few roundings of the weights and of the result.
BOUNDS: Final = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
#: Entries before the rows of a long text: kernels split it (CPUs at 512).
LONG: Final = 600
#: Rows of a chunk: more than a tile of any kernel holds.
_CHUNK: Final = 80
#: Row-heads of a tile of the kernels for a GPU.
TILE_SIZES: Final = (16, 32, 64)
#: Of a sequence in a batch: entries before, rows, and their parents.
_Part: TypeAlias = tuple[int, int, tuple[int, ...]]
#: Each row follows its half: a binary tree.
_TREE: Final = (-1, *((row - 1) // 2 for row in range(1, MAX_TREE_ROWS - 1)), 0)


def difference(
    kernels: AttentionKernels, shapes: Sequence[LayerShape], *, block_size: int, device: torch.device
) -> str | None:
    """Run the kernels once for every shape and kind of batch; None if each row is right, else what differs.

    What the kernels raise is passed on.
    """
    checked = set()
    for shape in shapes:
        key = (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim, shape.dtype, shape.window)
        if key in checked or shape.dtype not in BOUNDS:
            continue
        checked.add(key)
        for name, batch, caches in _batches(shape, block_size, device):
            worst = _distance(kernels, shape, batch, caches)
            if not worst <= BOUNDS[shape.dtype]:  # NaN is not, either
                return f"{name}: a row of attention is off by {worst:.2g} of its size (at most {BOUNDS[shape.dtype]:g})"
    return None


def _variants(group: int) -> dict[str, list[_Part]]:
    """Batches that between them run every variant of the kernels for a GPU, so that none is compiled while requests
    wait: tiles of each size, in chains and trees, over texts that are split and that are not.
    """
    return {
        f"{rows} rows after {before} entries{' as a tree' * is_tree}": [(before, rows, _TREE[:rows] if is_tree else ())]
        for rows in sorted({max(1, size // group) for size in TILE_SIZES})
        for before in (LONG, 0)
        for is_tree in (False, True)
    }


def _batches(
    shape: LayerShape, block_size: int, device: torch.device
) -> Iterator[tuple[str, PagedBatch, tuple[torch.Tensor, torch.Tensor]]]:
    """Batches of every kind on caches of random entries; what nobody has written is NaN."""
    kinds: dict[str, list[_Part]] = {
        "a tree after a long text": [(LONG, len(_TREE), _TREE), (7, 5, ()), (LONG // 3, 1, ())],
        "a row after a long text": [(LONG, 1, ())],
        "a chunk of a prompt": [(3, _CHUNK, ()), (0, 1, ())],
        "rows of short texts": [(5, 1, ()), (0, 2, ()), (9, 1, ())],
    }
    if device.type == "cuda":
        kinds |= _variants(shape.num_heads // shape.num_kv_heads)
    generator = torch.Generator().manual_seed(22)
    for name, parts in kinds.items():
        pool = KVPool(sum(-(-(before + rows) // block_size) for before, rows, _ in parts), block_size)
        ((keys, values),) = allocate_caches([shape], pool.total_blocks, block_size, torch.device("cpu"))
        keys.fill_(torch.nan)
        values.fill_(torch.nan)
        segments = []
        for before, rows, parents in parts:
            sequence = pool.open(before + rows)
            entry = torch.arange(before)
            blocks = torch.from_numpy(sequence.blocks).long()[entry // block_size]
            for cache in (keys, values):
                drawn = torch.randn(before, cache.shape[1], cache.shape[3], generator=generator)
                cache[blocks, :, entry % block_size] = drawn.to(cache.dtype)
            sequence.length = before
            segments.append(Segment(sequence, [0] * rows, 0, parents=parents))
        batch = build_batch(segments, block_size=block_size, vocab_size=1, max_model_len=sys.maxsize)
        yield name, PagedBatch(batch.to(device)), (keys.to(device), values.to(device))


def _distance(
    kernels: AttentionKernels, shape: LayerShape, batch: PagedBatch, caches: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """The worst distance of a row [T, Hq] from the reference, relative to the row's own size."""
    k_cache, v_cache = caches
    plan = batch.batch.plan
    generator = torch.Generator().manual_seed(23)
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    query, key, value = (
        torch.randn(plan.num_rows, *size, generator=generator).to(k_cache.device, shape.dtype)
        for size in ((heads, dim), (kv_heads, dim), (kv_heads, shape.value_dim))
    )
    expected = k_cache.to(torch.float32, copy=True), v_cache.to(torch.float32, copy=True)
    write_kv(*expected, key.float(), value.float(), batch)
    kernels.write_kv(k_cache, v_cache, key, value, plan)
    scale = shape.head_dim**-0.5
    answers = kernels.paged_attention(query, k_cache, v_cache, plan, scale, shape.window).float()
    wanted = paged_attention(query.float(), *expected, batch, scale=scale, window=shape.window)
    return float(((answers - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)).max())
