"""Triton kernels that round rows to numbers of 8 bits (e4m3); :mod:`engine.cuda.float8` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

#: ``ROW_TILE`` of :mod:`engine.cuda.float8`.
_ROW_TILE = tl.constexpr(4)


@triton.jit
def store_rounded(  # noqa: PLR0917
    x, codes, scales, row, num_rows, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr
):
    """Round a row, float32 [PADDED_DIM] with zeros behind DIM, so that the largest magnitude of each GROUP becomes 448.

    codes e4m3 [num_rows, DIM]; scales float32 [groups, num_rows rounded up to ROW_TILE]. PADDED_DIM is
    whole groups.
    """
    groups = tl.reshape(x, [PADDED_DIM // GROUP, GROUP])
    scale = tl.maximum(tl.max(tl.abs(groups), 1), 1e-12) / 448.0
    g = tl.arange(0, PADDED_DIM // GROUP)
    tl.store(scales + g * (tl.cdiv(num_rows, _ROW_TILE) * _ROW_TILE) + row, scale, mask=g * GROUP < DIM)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(codes + row.to(tl.int64) * DIM + k, (groups / scale[:, None]).to(codes.dtype.element_ty), mask=k < DIM)


@triton.jit
def round_rows(  # noqa: PLR0917
    x, codes, scales, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, IS_GATED: tl.constexpr
):
    """Round ``x`` [T, DIM], or silu(gate) * up of it, [T, 2 DIM]; see :func:`store_rounded`. Programs: rows."""
    row = tl.program_id(0)
    d = tl.arange(0, PADDED_DIM)
    own = x + row.to(tl.int64) * (2 * DIM if IS_GATED else DIM) + d
    numbers = tl.load(own, mask=d < DIM, other=0.0)
    if IS_GATED:  # rounded where ``silu_multiply`` rounds
        wide = numbers.to(tl.float32)
        active = (wide / (1.0 + tl.exp(-wide))).to(numbers.dtype)
        up = tl.load(own + DIM, mask=d < DIM, other=0.0)
        numbers = (active.to(tl.float32) * up.to(tl.float32)).to(numbers.dtype)
    store_rounded(numbers.to(tl.float32), codes, scales, row, tl.num_programs(0), DIM, PADDED_DIM, GROUP)
