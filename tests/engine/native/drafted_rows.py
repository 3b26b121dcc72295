"""The kernel that draws a drafted token, called on rows of logits without a model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.native.library import load
from engine.native.sampling import MAX_ROW_BYTES, sampler_of, samplings_of
from engine.native.sampling_structs import CDraftPlace
from engine.sampling.drafting import DraftedChain
from engine.sampling.rows import Rows
from specdec.rules import Rule, SparseRow

_Pointer = ctypes.c_void_p
_Int64 = ctypes.c_int64


def draft_rows(logits: torch.Tensor, rows: Rows, rules: Sequence[Rule]) -> list[DraftedChain]:
    """:func:`engine.sampling.drafting.draft` on a CPU, row by row: a chain of one token each.

    ``logits`` float32 [R, V], contiguous; rows of sessions that edit them are written to.
    """
    library = load()
    assert library is not None
    kernel = ctypes.CDLL(str(library.path)).tandem_draft_rows
    kernel.argtypes = (_Pointer, _Int64, _Int64, _Pointer, _Pointer, _Pointer, _Pointer)
    count, prefix = len(rows), rows.prefix.contiguous()
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    token_ids, sizes = (_Int64 * count)(), (ctypes.c_int32 * count)()
    q = memoryview(bytearray(MAX_ROW_BYTES * count))
    at = {
        "prefix": prefix.data_ptr(),
        "q": ctypes.addressof(ctypes.c_char.from_buffer(q)),
        "q_bytes": ctypes.addressof(sizes),
    }
    places = (CDraftPlace * count)(
        *(
            CDraftPlace(
                at["prefix"] + 8 * prefix.shape[1] * r,
                rows.prefix_lens[r],
                base,
                at["q"] + MAX_ROW_BYTES * r,
                at["q_bytes"] + 4 * r,
            )
            for r, base in enumerate(rows.bases)
        )
    )
    samplers = (_Pointer * count)(*map(sampler_of, rows.states))
    samplings = (ctypes.c_int32 * count)(*samplings_of(rows, rules))
    arrays = [ctypes.addressof(part) for part in (samplers, samplings, places, token_ids)]
    status = kernel(logits.data_ptr(), logits.shape[1], count, *arrays)
    if status:
        raise MemoryError("working memory for sampling")
    return [
        DraftedChain(
            (token_ids[r],),
            (SparseRow(bytes(q[start : start + sizes[r]])),) if sizes[r] else (),
        )
        for r, start in enumerate(range(0, MAX_ROW_BYTES * count, MAX_ROW_BYTES))
    ]
