"""Attention over the paged cache by the native kernels: nothing is gathered, and rows of a sequence share its stream.

A row's result is the same to the bit whatever other rows stand in the batch, however many threads run it, and however
large a cache block is (see attention.h).
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from engine.compaction import move_entries
from engine.native import recurrent
from engine.native.library import DTYPES, loaded
from engine.native.model_structs import CAttentionShape, CPlan
from engine.plan import BatchPlan

__all__ = ["KNOWS_SINKS", "RECURRENCES", "move_entries", "paged_attention", "write_kv"]

KNOWS_SINKS: Final = False
RECURRENCES: Final = recurrent


def paged_attention(  # noqa: PLR0917
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: BatchPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    num_threads: int | None = None,
    *,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend every row to the cached entries of its sequence and to its ancestors (in a chain: the rows before it).

    query [T, Hq, D] (any strides over rows and heads); k_cache [N, Hkv, block, D]; v_cache [N, Hkv, block, Dv]; each
    float32 or bfloat16, the caches of one dtype; softmax and sums are float32. ``window`` counts the entries a row
    sees, itself included. Scores are ``query · key * scale``, then ``softcap * tanh(scores / softcap)`` where given.
    ``num_threads`` None takes torch's. Returns [T, Hq, Dv] in the query's dtype.

    Raises:
        NotImplementedError: a dtype or layout the kernel does not know, sinks, or there are no kernels here.
    """
    if sinks is not None:
        raise NotImplementedError("attention with sinks")
    if query.dtype not in DTYPES or k_cache.dtype not in DTYPES or v_cache.dtype != k_cache.dtype:
        raise NotImplementedError(f"attention of {query.dtype} rows over {k_cache.dtype} and {v_cache.dtype} caches")
    _check_cache(k_cache)
    _check_cache(v_cache)
    if query.stride(2) != 1:
        query = query.contiguous()
    num_rows, heads, head_dim = query.shape
    kv_heads, value_dim = k_cache.shape[1], v_cache.shape[3]
    shape = CAttentionShape(
        heads,
        kv_heads,
        head_dim,
        value_dim,
        k_cache.stride(0),
        v_cache.stride(0),
        scale,
        softcap or 0.0,
        window or 0,
    )
    out = query.new_empty(num_rows, heads, value_dim)
    failed = loaded().attention(
        ctypes.byref(CPlan.of(plan)),
        ctypes.byref(shape),
        DTYPES[query.dtype],
        DTYPES[k_cache.dtype],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        num_threads or torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("working memory for attention")
    return out


def write_kv(
    k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: BatchPlan
) -> None:
    """Put every row's key [T, Hkv, D] and value [T, Hkv, Dv] into its slot; rows and caches of one dtype.

    Raises:
        NotImplementedError: dtypes differ or are neither of 2 nor 4 bytes.
    """
    library = loaded()
    for cache, rows in ((k_cache, key), (v_cache, value)):
        _check_cache(cache)
        if rows.dtype != cache.dtype or rows.itemsize not in (2, 4):
            raise NotImplementedError(f"{rows.dtype} rows into a {cache.dtype} cache")
        dense = rows if rows.stride(2) == 1 else rows.contiguous()
        library.write_rows(
            dense.itemsize,
            dense.data_ptr(),
            dense.shape[0],
            dense.stride(0),
            dense.stride(1),
            dense.shape[1],
            dense.shape[2],
            cache.data_ptr(),
            cache.stride(0),
            cache.shape[2],
            plan.slots.data_ptr(),
        )


def _check_cache(cache: torch.Tensor) -> None:
    _, _, block_size, dim = cache.shape
    if cache.device.type != "cpu" or cache.stride()[1:] != (block_size * dim, dim, 1):
        raise NotImplementedError(f"a cache on {cache.device} with strides {cache.stride()}; blocks must be contiguous")
