"""Triton kernels for attention with all that stands before and behind it; :mod:`engine.cuda.rotary_attention` launches
them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.cuda.kernels import PLAN_TENSORS, fold, sequence_of


@triton.jit
def _rotated(  # noqa: PLR0917
    qkv,
    at,
    cosines,
    sines,
    angle_at,
    norm,
    eps,
    d,
    is_there,
    HALF: tl.constexpr,
    AXIS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads that begin at ``at``, normed (where there is a norm) and rotated, halves as in transformers.

    at and angle_at [M, 1] with d [1, D] and AXIS 1, or [1, N] with [D, 1] and 0. Rounded where the modules round.
    """
    is_number = d < 2 * HALF
    pair = tl.where(d < HALF, d + HALF, d - HALF)
    mask = is_there & is_number
    own = tl.load(qkv + at + d, mask=mask, other=0.0)
    number = own.dtype
    own = own.to(tl.float32)
    other = tl.load(qkv + at + pair, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(own * own, AXIS, keep_dims=True) / (2 * HALF) + eps)
        own_weight = tl.load(norm + d, mask=is_number, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + pair, mask=is_number, other=0.0).to(tl.float32)
        own = (own_weight * (own * scale).to(number).to(tl.float32)).to(number).to(tl.float32)
        other = (other_weight * (other * scale).to(number).to(tl.float32)).to(number).to(tl.float32)
    cosine = tl.load(cosines + angle_at + d, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle_at + d, mask=mask, other=0.0).to(tl.float32)
    turned = (other * sine).to(number).to(tl.float32)
    return ((own * cosine).to(number).to(tl.float32) + tl.where(d < HALF, -turned, turned)).to(number)


@triton.jit
def _joined(  # noqa: PLR0917
    parts,
    part_max,
    part_sum,
    at,
    is_row,
    num_parts,
    DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What all parts of row-heads make, float32 [M, D]; other programs wrote them: what is near is not read.

    Parts are read CHUNK at a time: one after another, each waits for the memory. With that, and without the parts that
    a short text leaves empty, a launch takes 6.8 us for 22.3 (H200, one row after 512 entries).
    """
    e = tl.arange(0, PADDED_DIM)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    attended = tl.zeros([TILE_M, PADDED_DIM], tl.float32)
    for first in range(0, num_parts, CHUNK):
        part = first + tl.arange(0, CHUNK)
        place = at[:, None] + part[None, :]
        is_part = is_row[:, None] & (part < num_parts)[None, :]
        peaks = tl.load(part_max + place, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(part_sum + place, mask=is_part, other=0.0, cache_modifier=".cg")
        values = tl.load(
            parts + (place * DIM)[:, :, None] + e[None, None, :],
            mask=is_part[:, :, None] & (e < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [M, CHUNK, D]
        new_peak = tl.maximum(peak, tl.max(peaks, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weights = tl.exp2(peak - base), tl.exp2(peaks - base[:, None])
        total = total * decay + tl.sum(totals * weights, 1)
        attended = attended * decay[:, None] + tl.sum(values * weights[:, :, None], 1)
        peak = new_peak
    return attended / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _round_rows(  # noqa: PLR0917
    x,
    codes,
    scales,
    first_row,
    num_rows,
    scales_stride,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Round some rows of ``x`` [T, DIM] that other programs wrote; as :mod:`engine.cuda.float8_kernels` does."""
    r = tl.arange(0, ROWS)
    is_row = (r < num_rows)[:, None]
    row = first_row + r.to(tl.int64)
    k = tl.arange(0, CHUNK)
    top = tl.zeros([ROWS], tl.float32)
    if GROUP == DIM:
        for start in range(0, DIM, CHUNK):
            place = x + (row * DIM)[:, None] + start + k[None, :]
            numbers = tl.load(place, mask=is_row & (start + k < DIM)[None, :], other=0.0, cache_modifier=".cg")
            top = tl.maximum(top, tl.max(tl.abs(numbers.to(tl.float32)), 1))
        tl.store(scales + row, tl.maximum(top, 1e-12) / 448.0, mask=r < num_rows)
    for start in range(0, DIM, CHUNK):
        at = (row * DIM)[:, None] + start + k[None, :]
        mask = is_row & (start + k < DIM)[None, :]
        numbers = tl.load(x + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        if GROUP == DIM:
            rounded = numbers / (tl.maximum(top, 1e-12) / 448.0)[:, None]
        else:
            groups = tl.reshape(numbers, [ROWS, CHUNK // GROUP, GROUP])
            scale = tl.maximum(tl.max(tl.abs(groups), 2), 1e-12) / 448.0
            g = start // GROUP + tl.arange(0, CHUNK // GROUP)
            is_group = is_row & (g * GROUP < DIM)[None, :]
            tl.store(scales + g[None, :] * scales_stride + row[:, None], scale, mask=is_group)
            rounded = tl.reshape(groups / scale[:, :, None], [ROWS, CHUNK])
        tl.store(codes + at, rounded.to(codes.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "scales_stride"], do_not_specialize_on_alignment=PLAN_TENSORS
)
def rotate_attend(  # noqa: PLR0912, PLR0915, PLR0917
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    k_cache,
    v_cache,
    out,
    parts,
    part_max,
    part_sum,
    counters,
    codes,
    scales,
    row_starts,
    kv_lens,
    block_tables,
    positions,
    ancestors,
    slots,
    eps,
    scale,
    scales_stride,
    num_sequences,
    table_stride,
    k_block_stride,
    v_block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    JOINS: tl.constexpr,
    ROUNDED_GROUP: tl.constexpr,
    ROUNDED_CHUNK: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_FED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """:func:`engine.cuda.kernels.attend` of rows whose keys and values are not cached yet: norms and rotates them, and
    writes the keys and values of its own rows. Programs: (tile, key head, split).

    qkv [T, Hq + 2 Hkv, D]; cosines and sines [T, D]; out [T, Hq, D]. IS_SPLIT: parts float32
    [T, Hq, splits, D] with part_max and part_sum [T, Hq, splits]; with JOINS the last program of a tile and
    key head joins them, which ``counters`` tell it, int32 zeros before and after. ROUNDED_GROUP: the last program of a
    tile rounds its rows of out to codes, e4m3, in groups of so many numbers (0: none does).
    """
    DIM: tl.constexpr = 2 * HALF
    HEADS: tl.constexpr = KV_HEADS * GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    sequence = sequence_of(row_starts, num_sequences, tile, TILE_ROWS)
    first_row = tl.load(row_starts + sequence)
    num_rows = tl.load(row_starts + sequence + 1) - first_row
    start = (tile - first_row // TILE_ROWS - sequence) * TILE_ROWS
    if start >= num_rows:
        return

    kv_len = tl.load(kv_lens + sequence)
    prefix = tl.maximum(kv_len - num_rows, 0)  # entries that are cached
    m = tl.arange(0, TILE_M)
    row = start + m // GROUP
    is_row = (m // GROUP < TILE_ROWS) & (row < num_rows)
    head = kv_head * GROUP + m % GROUP
    place = (first_row + row).to(tl.int64)
    d = tl.arange(0, PADDED_DIM)
    row_at = place * ((HEADS + 2 * KV_HEADS) * DIM)
    bits = place
    position = prefix + row
    if HAS_TREES:
        bits = tl.load(ancestors + place, mask=is_row, other=0)
        position = tl.load(positions + place, mask=is_row, other=0).to(tl.int32)

    # What this tile sees: tiles of N cached entries, then of rows that are fed; and this program's share of them.
    num_seen = tl.where(kv_len > 0, tl.minimum(start + TILE_ROWS, num_rows), 0)
    num_cached = tl.cdiv(prefix, TILE_N)
    num_tiles = num_cached + tl.cdiv(num_seen, TILE_FED)
    first_tile = 0
    if WINDOW > 0:
        if HAS_TREES:  # rows that stand behind a block have positions before it
            first_seen = tl.min(tl.where(is_row, position, prefix), 0) - WINDOW + 1
            first_tile = tl.minimum(tl.maximum(first_seen, 0) // TILE_N, num_cached)
        else:
            first_seen = prefix + start - WINDOW + 1
            first_tile = tl.minimum(tl.maximum(first_seen, 0) // TILE_N, num_cached)
            first_tile += tl.maximum(start - WINDOW + 1, 0) // TILE_FED
    num_left = tl.maximum(num_tiles - first_tile, 0)
    share = tl.cdiv(num_left, num_splits)
    num_parts = num_splits
    if JOINS:  # a short text has fewer parts than there are programs
        num_parts = tl.maximum(tl.cdiv(num_left, tl.maximum(share, 1)), 1)
    if split >= num_parts:
        return
    from_tile = first_tile + split * share
    to_tile = tl.minimum(from_tile + share, num_tiles)

    q = _rotated(
        qkv,
        (row_at + head * DIM)[:, None],
        cosines,
        sines,
        (place * DIM)[:, None],
        query_norm,
        eps,
        d[None, :],
        is_row[:, None],
        HALF,
        1,
        HAS_NORMS,
    )  # [M, D]
    if split == 0:
        is_own = is_row & (m % GROUP == 0)
        slot = tl.load(slots + place, mask=is_own, other=0)
        block = slot // BLOCK_SIZE
        in_block = (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * DIM
        is_number = is_own[:, None] & (d < DIM)[None, :]
        key = _rotated(
            qkv,
            (row_at + (HEADS + kv_head) * DIM)[:, None],
            cosines,
            sines,
            (place * DIM)[:, None],
            key_norm,
            eps,
            d[None, :],
            is_own[:, None],
            HALF,
            1,
            HAS_NORMS,
        )
        tl.store(k_cache + (block * k_block_stride + in_block)[:, None] + d[None, :], key, mask=is_number)
        value_at = (row_at + (HEADS + KV_HEADS + kv_head) * DIM)[:, None] + d[None, :]
        value = tl.load(qkv + value_at, mask=is_number, other=0.0)
        tl.store(v_cache + (block * v_block_stride + in_block)[:, None] + d[None, :], value, mask=is_number)

    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    attended = tl.zeros([TILE_M, PADDED_DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for index in range(from_tile, tl.minimum(to_tile, num_cached)):
        n = index * TILE_N + tl.arange(0, TILE_N)
        is_entry = n < prefix  # what nobody has written may be NaN, and 0 * NaN is NaN
        block = tl.load(table + n // BLOCK_SIZE, mask=is_entry, other=0).to(tl.int64)
        in_block = (kv_head * BLOCK_SIZE + n % BLOCK_SIZE) * DIM
        keys = tl.load(
            k_cache + (block * k_block_stride + in_block)[None, :] + d[:, None],
            mask=is_entry[None, :] & (d < DIM)[:, None],
            other=0.0,
        )  # [D, N]
        values = tl.load(
            v_cache + (block * v_block_stride + in_block)[:, None] + d[None, :],
            mask=is_entry[:, None] & (d < DIM)[None, :],
            other=0.0,
        )  # [N, D]
        sees = is_row[:, None] & is_entry[None, :]
        if WINDOW > 0:
            sees &= n[None, :] > position[:, None] - WINDOW
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        peak, total, attended = fold(scores, sees, values, peak, total, attended)
    for index in tl.range(tl.maximum(from_tile, num_cached), to_tile, num_stages=1):
        r = (index - num_cached) * TILE_FED + tl.arange(0, TILE_FED)
        is_fed = r < num_seen
        fed = (first_row + r).to(tl.int64)
        fed_at = fed * ((HEADS + 2 * KV_HEADS) * DIM) + (HEADS + kv_head) * DIM
        keys = _rotated(
            qkv,
            fed_at[None, :],
            cosines,
            sines,
            (fed * DIM)[None, :],
            key_norm,
            eps,
            d[:, None],
            is_fed[None, :],
            HALF,
            0,
            HAS_NORMS,
        )  # [D, N]
        values = tl.load(
            qkv + (fed_at + KV_HEADS * DIM)[:, None] + d[None, :],
            mask=is_fed[:, None] & (d < DIM)[None, :],
            other=0.0,
        )  # [N, D]
        sees = is_row[:, None] & is_fed[None, :] & (r[None, :] <= row[:, None])
        if HAS_TREES:
            is_ancestor = (bits[:, None] >> tl.minimum(r, 63).to(tl.int64)[None, :]) & 1 == 1
            sees &= (r > 63)[None, :] | is_ancestor
        if WINDOW > 0:
            if HAS_TREES:
                depth = tl.load(positions + fed, mask=is_fed, other=0).to(tl.int32)
                sees &= depth[None, :] > position[:, None] - WINDOW
            else:
                sees &= r[None, :] > row[:, None] - WINDOW
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        peak, total, attended = fold(scores, sees, values, peak, total, attended)

    target = place * HEADS + head
    is_value = is_row[:, None] & (d < DIM)[None, :]
    is_last = split == 0
    if IS_SPLIT:
        at = target * num_splits
        tl.store(part_max + at + split, peak, mask=is_row)
        tl.store(part_sum + at + split, total, mask=is_row)
        if (from_tile < to_tile) | (split == 0):
            tl.store(parts + ((at + split) * DIM)[:, None] + d[None, :], attended, mask=is_value)
        if JOINS:
            tl.debug_barrier()  # all threads have written before one says so
            counter = counters + tile * KV_HEADS + kv_head
            is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
            if is_last:
                tl.store(counter, 0)
                result = _joined(parts, part_max, part_sum, at, is_row, num_parts, DIM, TILE_M, PADDED_DIM, CHUNK)
                tl.store(out + (target * DIM)[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_value)
    else:
        result = attended / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (target * DIM)[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=is_value)
    if ROUNDED_GROUP > 0:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if is_last:
            tl.debug_barrier()
            counter = counters + tl.num_programs(0) * KV_HEADS + tile
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == KV_HEADS - 1:
                tl.store(counter, 0)
                _round_rows(
                    out,
                    codes,
                    scales,
                    first_row + start,
                    tl.minimum(num_rows - start, TILE_ROWS),
                    scales_stride,
                    HEADS * DIM,
                    ROUNDED_GROUP,
                    PADDED_ROWS,
                    ROUNDED_CHUNK,
                )
