"""A Triton kernel for linear layers of few rows; :mod:`engine.cuda.few_rows` launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def multiply(  # noqa: PLR0917
    x,
    weight,
    bias,
    norm,
    out,
    num_rows,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """``x`` [num_rows, IN] times ``weight`` [OUT, IN] to ``out`` [num_rows, OUT]. Programs: (tile of rows, tile of
    outputs); those that read the same weights run side by side.

    HAS_NORM: of rows normed by their root mean square; the scale of a row is applied to its sums, since it is known
    when they are. IS_GATED: silu of the first OUT outputs times the next OUT, of 2 OUT. ADDS: to what ``out`` holds.
    """
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    is_row = m < num_rows
    is_output = n < OUT
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    ups = sums
    squares = tl.zeros([TILE_M], tl.float32)
    rows = weight + n.to(tl.int64)[None, :] * IN
    for start in range(0, IN, TILE_K):
        k = start + tl.arange(0, TILE_K)
        is_input = k < IN
        a = tl.load(x + m[:, None] * IN + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0)
        if HAS_NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            a = (wide * tl.load(norm + k, mask=is_input, other=0.0).to(tl.float32)[None, :]).to(a.dtype)
        is_number = is_input[:, None] & is_output[None, :]
        sums += tl.dot(a, tl.load(rows + k[:, None], mask=is_number, other=0.0), input_precision="ieee")
        if IS_GATED:
            more = tl.load(rows + OUT * IN + k[:, None], mask=is_number, other=0.0)
            ups += tl.dot(a, more, input_precision="ieee")
    if HAS_NORM:
        scale = tl.rsqrt(squares / IN + eps)[:, None]
        sums *= scale
        ups *= scale
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            ups += tl.load(bias + OUT + n, mask=is_output, other=0.0).to(tl.float32)[None, :]
    number = out.dtype.element_ty
    result = sums.to(number)
    if IS_GATED:
        wide = result.to(tl.float32)
        active = (wide / (1.0 + tl.exp(-wide))).to(number)
        result = (active.to(tl.float32) * ups.to(number).to(tl.float32)).to(number)
    place = out + m[:, None] * OUT + n[None, :]
    is_place = is_row[:, None] & is_output[None, :]
    if ADDS:
        result = (tl.load(place, mask=is_place, other=0.0).to(tl.float32) + result.to(tl.float32)).to(number)
    tl.store(place, result, mask=is_place)
