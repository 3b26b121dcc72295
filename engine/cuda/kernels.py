"""Triton kernels for attention over the paged cache; :mod:`engine.cuda.attention` launches them.

``attend`` serves prefill chunks, decoding and verification alike. A program takes a tile of rows of one sequence with
all the query heads that share a key head, walks its part of the sequence's entries with a running softmax in float32
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"), and leaves the result, or, where the entries
are split over several programs, its share of it for ``join`` (Dao et al. 2023, "Flash-Decoding").
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.cuda.float8_kernels import store_rounded

#: Parameters that lie wherever a plan put them: a kernel must not be compiled again for each alignment.
PLAN_TENSORS: Final = ["row_starts", "kv_lens", "block_tables", "positions", "ancestors", "slots"]


@triton.jit
def sequence_of(row_starts, num_sequences, tile, TILE_ROWS: tl.constexpr):
    """The sequence of a tile, by bisection: s has the tiles from row_starts[s] // TILE_ROWS + s on."""
    sequence = 0
    behind = num_sequences
    while behind - sequence > 1:
        middle = (sequence + behind) // 2
        is_before = tl.load(row_starts + middle) // TILE_ROWS + middle <= tile
        sequence = tl.where(is_before, middle, sequence)
        behind = tl.where(is_before, behind, middle)
    return sequence


@triton.jit
def fold(scores, sees, values, peak, total, attended):  # noqa: PLR0917
    """Take a tile of entries into the running softmax: scores [M, N], sees bool [M, N], values [N, Dv]."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores = tl.where(sees, scores * LOG2_E, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    attended = attended * decay[:, None]
    attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_peak, total * decay + tl.sum(weights, 1), attended


@triton.jit(do_not_specialize=["num_sequences", "table_stride"], do_not_specialize_on_alignment=PLAN_TENSORS)
def attend(  # noqa: PLR0912, PLR0915, PLR0917
    query,
    k_cache,
    v_cache,
    out,
    part_max,
    part_sum,
    row_starts,
    kv_lens,
    block_tables,
    positions,
    ancestors,
    sinks,
    scale,
    softcap,
    num_sequences,
    table_stride,
    query_row_stride,
    query_head_stride,
    k_block_stride,
    v_block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_TREES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Attend a tile of rows to a part of the entries. Programs: (tile, key head, split).

    query [T, Hq, D]; out [T, Hq, Dv], or float32 [T, Hq, splits, Dv] with part_max and part_sum [T, Hq, splits]. A tile
    is TILE_ROWS rows of one sequence; M counts row-heads, N entries. Sequence s has the tiles from
    row_starts[s] // TILE_ROWS + s on, which are enough for its rows wherever they start.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
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
    prefix = kv_len - num_rows  # entries that were there before the rows; negative for padding
    m = tl.arange(0, TILE_M)
    row = start + m // GROUP
    is_row = (m // GROUP < TILE_ROWS) & (row < num_rows)
    head = kv_head * GROUP + m % GROUP
    own = prefix + row  # each row's own entry
    place = (first_row + row).to(tl.int64)
    d = tl.arange(0, PADDED_HEAD_DIM)
    e = tl.arange(0, PADDED_VALUE_DIM)
    q = tl.load(
        query + (place * query_row_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=is_row[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )  # [M, D]
    if HAS_TREES:
        bits = tl.load(ancestors + place, mask=is_row, other=0)
        position = tl.load(positions + place, mask=is_row, other=0).to(tl.int32)
    else:
        bits = own
        position = own

    # The entries this tile sees, in tiles of N, and this program's share of them.
    end = tl.minimum(prefix + start + TILE_ROWS, kv_len)
    first_tile = 0
    if WINDOW > 0:
        first_seen = prefix - WINDOW + 1
        if HAS_TREES:  # rows that stand behind a block have positions before it
            first_seen = tl.min(tl.where(is_row, position, prefix), 0) - WINDOW + 1
        else:
            first_seen += start
        first_tile = tl.maximum(first_seen, 0) // TILE_N
    num_tiles = tl.maximum(tl.cdiv(end, TILE_N) - first_tile, 0)
    share = tl.cdiv(num_tiles, num_splits)
    from_tile = first_tile + split * share
    to_tile = tl.minimum(from_tile + share, first_tile + num_tiles)

    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - this one is decided when the kernel is compiled
        if split == 0:
            peak = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    attended = tl.zeros([TILE_M, PADDED_VALUE_DIM], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    for index in range(from_tile, to_tile):
        n = index * TILE_N + tl.arange(0, TILE_N)
        is_entry = n < end  # what nobody has written may be NaN, and 0 * NaN is NaN
        block = tl.load(table + n // BLOCK_SIZE, mask=is_entry, other=0).to(tl.int64)
        in_block = kv_head * BLOCK_SIZE + n % BLOCK_SIZE
        keys = tl.load(
            k_cache + (block * k_block_stride + in_block * HEAD_DIM)[None, :] + d[:, None],
            mask=is_entry[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )  # [D, N]
        scores = tl.dot(q, keys, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))  # tanh
        sees = is_row[:, None] & (n[None, :] <= own[:, None])
        if HAS_TREES:
            other = n - prefix  # the entry's row
            is_ancestor = (bits[:, None] >> tl.minimum(tl.maximum(other, 0), 63).to(tl.int64)[None, :]) & 1 == 1
            sees &= (other < 0)[None, :] | (other > 63)[None, :] | is_ancestor
        if WINDOW > 0:
            if HAS_TREES:
                is_fed = (other >= 0) & (other < num_rows)
                depth = tl.load(positions + first_row + other, mask=is_fed, other=0).to(tl.int32)
                sees &= tl.where(is_fed, depth, n)[None, :] > position[:, None] - WINDOW
            else:
                sees &= n[None, :] > position[:, None] - WINDOW
        values = tl.load(
            v_cache + (block * v_block_stride + in_block * VALUE_DIM)[:, None] + e[None, :],
            mask=is_entry[:, None] & (e < VALUE_DIM)[None, :],
            other=0.0,
        )  # [N, Dv]
        peak, total, attended = fold(scores, sees, values, peak, total, attended)

    target = place * (KV_HEADS * GROUP) + head
    is_value = is_row[:, None] & (e < VALUE_DIM)[None, :]
    if IS_SPLIT:
        target = target * num_splits + split
        tl.store(part_max + target, peak, mask=is_row)
        tl.store(part_sum + target, total, mask=is_row)
        if (from_tile < to_tile) | (split == 0):
            tl.store(out + (target * VALUE_DIM)[:, None] + e[None, :], attended, mask=is_value)
    else:
        attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + (target * VALUE_DIM)[:, None] + e[None, :], attended.to(out.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["num_splits"])
def join(  # noqa: PLR0917
    out,
    parts,
    part_max,
    part_sum,
    num_splits,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Join the parts of a row-head, weighed by what their softmax was scaled with. Programs: row-heads.

    out [T, Hq, Dv]; parts float32 [T, Hq, splits, Dv]; part_max and part_sum float32 [T, Hq, splits]. The number of
    splits grows with the text: it is no constant, so that nothing is compiled again.
    """
    target = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    is_split = split < num_splits
    s = target * num_splits + split
    e = tl.arange(0, PADDED_VALUE_DIM)
    peaks = tl.load(part_max + s, mask=is_split, other=float("-inf"))
    sums = tl.load(part_sum + s, mask=is_split, other=0.0)
    peak = tl.max(peaks, 0)
    is_used = peaks > float("-inf")
    weights = tl.where(is_used, tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak)), 0.0)
    values = tl.load(
        parts + (s * VALUE_DIM)[:, None] + e[None, :],
        mask=is_used[:, None] & (e < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights * sums, 0)
    joined = tl.sum(weights[:, None] * values, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + target * VALUE_DIM + e, joined.to(out.dtype.element_ty), mask=e < VALUE_DIM)


@triton.jit(do_not_specialize_on_alignment=PLAN_TENSORS)
def write(  # noqa: PLR0917
    key,
    value,
    k_cache,
    v_cache,
    slots,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    k_block_stride,
    v_block_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Put keys [T, Hkv, D] and values [T, Hkv, Dv] into their slots. Programs: rows."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    h = tl.arange(0, PADDED_KV_HEADS)[:, None]
    d = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    e = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    is_key = (h < KV_HEADS) & (d < HEAD_DIM)
    is_value = (h < KV_HEADS) & (e < VALUE_DIM)
    keys = tl.load(key + row * key_row_stride + h * key_head_stride + d, mask=is_key)
    tl.store(k_cache + block * k_block_stride + (h * BLOCK_SIZE + offset) * HEAD_DIM + d, keys, mask=is_key)
    values = tl.load(value + row * value_row_stride + h * value_head_stride + e, mask=is_value)
    tl.store(v_cache + block * v_block_stride + (h * BLOCK_SIZE + offset) * VALUE_DIM + e, values, mask=is_value)


@triton.jit(do_not_specialize=["num_moves"], do_not_specialize_on_alignment=["moves", "caches"])
def move(  # noqa: PLR0917
    moves,
    caches,
    num_moves,
    block_stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Move entries within caches [blocks, H, BLOCK_SIZE, DIM] of numbers of type NUMBER. Programs: (cache, head).

    moves int64 [4, num_moves]: source block and offset, target block and offset; caches int64: addresses. Moves are
    made one after the other, and an element by one thread: a source is read before a later move writes to it.
    """
    cache = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(NUMBER))
    head = tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)
    for i in range(num_moves):
        source = tl.load(moves + i) * block_stride + (head * BLOCK_SIZE + tl.load(moves + num_moves + i)) * DIM
        target = tl.load(moves + 2 * num_moves + i) * block_stride
        target += (head * BLOCK_SIZE + tl.load(moves + 3 * num_moves + i)) * DIM
        tl.store(cache + target + d, tl.load(cache + source + d, mask=d < DIM), mask=d < DIM)


@triton.jit
def add_norm(  # noqa: PLR0917
    x,
    delta,
    weight,
    out,
    eps,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    scales=None,
    GROUP: tl.constexpr = 0,
):
    """Add ``delta`` to ``x`` [T, DIM] in place, then norm it by its root mean square into ``out``. Programs: rows.

    Numbers are rounded where transformers' modules round them. With a GROUP ``out`` is e4m3; see
    :func:`~engine.cuda.float8_kernels.store_rounded`.
    """
    program = tl.program_id(0)
    row = program.to(tl.int64) * DIM
    d = tl.arange(0, PADDED_DIM)
    is_number = d < DIM
    own = tl.load(x + row + d, mask=is_number, other=0.0)
    if HAS_DELTA:
        own = (own.to(tl.float32) + tl.load(delta + row + d, mask=is_number, other=0.0).to(tl.float32)).to(own.dtype)
        tl.store(x + row + d, own, mask=is_number)
    wide = own.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)).to(own.dtype)
    scaled = (tl.load(weight + d, mask=is_number, other=0.0).to(tl.float32) * normed.to(tl.float32)).to(own.dtype)
    if GROUP > 0:
        store_rounded(scaled.to(tl.float32), out, scales, program, tl.num_programs(0), DIM, PADDED_DIM, GROUP)
    else:
        tl.store(out + row + d, scaled, mask=is_number)


@triton.jit(do_not_specialize_on_alignment=PLAN_TENSORS)
def angles(positions, frequencies, cosines, sines, scaling, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):  # noqa: PLR0917
    """Cosines and sines of rotary positions, times ``scaling``. Programs: rows.

    positions int64 [T]; frequencies [HALF]; cosines and sines [T, 2 HALF], both halves alike.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED_HALF)
    frequency = tl.load(frequencies + d, mask=d < HALF, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    place = row * (2 * HALF) + d
    cosine = (tl.cos(angle) * scaling).to(cosines.dtype.element_ty)
    sine = (tl.sin(angle) * scaling).to(sines.dtype.element_ty)
    for half in tl.static_range(2):
        tl.store(cosines + place + half * HALF, cosine, mask=d < HALF)
        tl.store(sines + place + half * HALF, sine, mask=d < HALF)


@triton.jit
def silu_multiply(gate_up, out, DIM: tl.constexpr, TILE: tl.constexpr):
    """silu(gate) * up of ``gate_up`` [T, 2 DIM] into ``out`` [T, DIM]. Programs: (row, tile)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + row * (2 * DIM) + d, mask=d < DIM, other=0.0)
    up = tl.load(gate_up + row * (2 * DIM) + DIM + d, mask=d < DIM, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * DIM + d, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=d < DIM)
