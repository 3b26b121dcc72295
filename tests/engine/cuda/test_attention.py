"""Attention in Triton against attention written out: in its interpreter where there is no GPU, compiled where there is.

Each batch is also cut into as many programs as a large GPU has places for, so that entries are split and joined.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine import compaction
from engine.cuda.attention import Launch, move_entries, paged_attention, write_kv
from engine.plan import BatchPlan
from tests.engine.paged import CHAINS, Case, Shape, random_tree
from tests.pairwise import parametrize_pairwise

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ONE, MANY = 1, 4000  # programs: entries are not split at all, and into as many parts as there may be
TREES: list[list[Shape]] = [
    [(9, [-1, 0, 0, 1, 1, 2])],
    [(5, [-1, -1, 0, 1])],
    [(6, random_tree(8, 1)), (3, 5), (30, random_tree(6, 2)), (0, random_tree(7, 3)), (4, 1)],
]


def attend(
    case: Case,
    *,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
    num_programs: int | None = None,
    plan: BatchPlan | None = None,
) -> torch.Tensor:
    """Write the rows' keys and values, then attend: on the CPU, in float64."""
    write_kv(case.k_cache, case.v_cache, case.new_keys, case.new_values, case.plan)
    sinks = case.sinks if has_sinks else None
    out = paged_attention(
        case.query, case.k_cache, case.v_cache, plan or case.plan, 0.4, window, softcap, num_programs, sinks=sinks
    )
    return out.cpu().double()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@parametrize_pairwise(
    {
        "shapes": CHAINS + TREES,
        "softcap, has_sinks": [(None, False), (1.5, True)],
        "window": [None, 5],
        "num_programs": [ONE, MANY],
    }
)
def test_it_equals_attention_by_hand(
    shapes: list[Shape], softcap: float | None, has_sinks: bool, window: int | None, num_programs: int
) -> None:
    case = Case(shapes, device=DEVICE)
    out = attend(case, window=window, softcap=softcap, has_sinks=has_sinks, num_programs=num_programs)
    close(out, case.expected(scale=0.4, window=window, softcap=softcap, has_sinks=has_sinks))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "block_size"),
    [
        *((7, 1, 24, 24, 16), (6, 2, 40, 8, 1), (3, 3, 33, 17, 8)),
        *(
            pytest.param(*shape, marks=pytest.mark.exhaustive)
            for shape in ((2, 2, 16, 16, 16), (8, 1, 64, 64, 32), (20, 1, 8, 8, 5))
        ),
    ],
)
def test_any_shape_of_heads_and_blocks(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, block_size: int
) -> None:
    case = Case([(70, 5), (0, 9), (31, 1)], heads, kv_heads, head_dim, value_dim, block_size, device=DEVICE)
    for num_programs in (ONE, MANY):
        close(attend(case, window=40, num_programs=num_programs), case.expected(scale=0.4, window=40))


@pytest.mark.parametrize(
    "num_programs", [ONE, 70, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (20, MANY))]
)
def test_long_contexts_are_split_and_joined(num_programs: int) -> None:
    shapes: list[Shape] = [(1003, 5), (511, 1), (64, 1), (700, [-1, 0, 0, 1]), (0, 1)]
    case = Case(shapes, 2, 1, 16, 16, 32, device=DEVICE)
    for window in (None, 300):
        close(attend(case, window=window, num_programs=num_programs), case.expected(scale=0.4, window=window))


def test_a_tree_as_large_as_it_may_be_beside_a_long_chunk() -> None:
    case = Case([(21, random_tree(64, 4)), (2, 70), (70, 3)], 4, 1, device=DEVICE)
    for window in (None, 9):
        close(attend(case, window=window, num_programs=ONE), case.expected(scale=0.4, window=window))


# The interpreter multiplies no bfloat16.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 3e-3), *([] if DEVICE == "cpu" else [(torch.bfloat16, 2e-2)])]
)
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    case = Case([(130, 5), (0, 20), (7, random_tree(9, 5))], 4, 2, 16, 16, 16, dtype, DEVICE)
    for num_programs in (ONE, MANY):
        close(attend(case, num_programs=num_programs), case.expected(scale=0.4), tolerance)


@pytest.mark.parametrize("num_programs", [ONE, MANY])
def test_padding_disturbs_nobody_and_comes_out_zero(num_programs: int) -> None:
    """A captured graph's batch: two sequences in use, one without rows, and one that takes the rows left over."""
    case, rows = Case([(19, 3), (40, 1)], device=DEVICE), 9
    plan, starts = case.plan, [0, 3, 4, 4, rows]
    tables = torch.zeros(4, 30, dtype=torch.int32, device=DEVICE)
    tables[:2, : plan.block_tables.shape[1]] = plan.block_tables
    tables[2:] = 10**6  # never looked at
    padded = replace(
        plan,
        positions=torch.cat([plan.positions, plan.positions.new_zeros(rows - 4)]),
        slots=torch.cat([plan.slots, plan.slots.new_zeros(rows - 4)]),
        row_starts=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        kv_lens=torch.tensor([22, 41, 10**6, 0], dtype=torch.int32, device=DEVICE),
        max_kv_len=120,
        max_rows=rows,
    )
    expected = case.expected(scale=0.4, has_sinks=True)
    case.query = torch.cat([case.query, case.query.new_full((rows - 4, *case.query.shape[1:]), float("inf"))])
    out = attend(case, has_sinks=True, num_programs=num_programs, plan=padded)
    close(out[:4], expected)
    assert not out[4:].any()


def test_caches_may_have_more_numbers_than_32_bits_count() -> None:
    case = Case([(6, 5), (30, 1)], dtype=torch.float16, device=DEVICE)
    expected = case.expected(scale=0.4)
    last_block = int(case.plan.slots.max()) // case.plan.block_size
    stride = 2**31 // last_block + 1  # so that this one lies behind 2**31
    storage = torch.empty(stride * case.k_cache.shape[0], dtype=torch.float16, device=DEVICE)  # hardly ever touched
    for name, offset in (("k_cache", 0), ("v_cache", stride // 2)):
        cache = getattr(case, name)
        far = storage.as_strided(cache.shape, (stride, *cache.stride()[1:]), offset)
        setattr(case, name, far.copy_(cache))
    for num_programs in (ONE, MANY):
        close(attend(case, num_programs=num_programs), expected, 3e-3)


def test_rows_are_read_and_written_in_any_layout() -> None:
    case = Case([(6, 5), (30, 1)], device=DEVICE)
    expected = case.expected(scale=0.4)
    case.query, case.new_keys, case.new_values = (
        rows.transpose(0, 1).contiguous().transpose(0, 1)  # heads before rows, as models make them
        for rows in (case.query, case.new_keys, case.new_values)
    )
    close(attend(case), expected)
    case.query, case.new_keys, case.new_values = (
        rows.transpose(1, 2).contiguous().transpose(1, 2)  # a head is not contiguous
        for rows in (case.query, case.new_keys, case.new_values)
    )
    close(attend(case), expected)


def test_what_it_does_not_know_is_refused() -> None:
    case = Case([(6, 5)], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"float32 rows over torch\.bfloat16 and torch\.float32 caches"):
        paged_attention(case.query, case.k_cache.bfloat16(), case.v_cache, case.plan, 1.0)
    with pytest.raises(NotImplementedError, match=r"torch\.float64 rows"):
        paged_attention(case.query.double(), case.k_cache.double(), case.v_cache.double(), case.plan, 1.0)
    sliced = case.k_cache[..., :4]
    with pytest.raises(NotImplementedError, match="blocks must be contiguous"):
        paged_attention(case.query, sliced, case.v_cache, case.plan, 1.0)
    with pytest.raises(NotImplementedError, match="blocks must be contiguous"):
        write_kv(sliced, case.v_cache, case.new_keys, case.new_values, case.plan)


def test_a_launch_fits_the_rows_and_fills_the_device() -> None:
    def launch(num_rows: int, num_sequences: int, max_rows: int, max_kv_len: int = 4096, itemsize: int = 2) -> Launch:
        rows = torch.zeros(num_rows, dtype=torch.int64)
        sizes = torch.zeros(num_sequences + 1, dtype=torch.int32)
        plan = BatchPlan(rows, rows, sizes, sizes[None], sizes[1:], max_kv_len, max_rows, 32)
        return Launch.of(plan, num_heads=32, num_kv_heads=8, dim=128, itemsize=itemsize, num_programs=528)

    assert launch(1, 1, 1) == Launch(tile_m=16, tile_rows=4, tile_n=64, num_splits=64)
    assert launch(1, 1, 1, max_kv_len=500) == Launch(16, 4, 64, 8)
    assert launch(5, 1, 5) == Launch(32, 8, 64, 64)
    assert launch(8, 2, 8) == Launch(32, 8, 64, 64)  # the same round in a bucket, with a sequence for padding
    assert launch(32, 33, 32) == Launch(16, 4, 64, 2)
    assert launch(64, 64, 1) == Launch(16, 4, 64, 1)
    assert launch(512, 1, 512) == Launch(64, 16, 64, 2)
    assert launch(512, 1, 512, itemsize=4) == Launch(16, 4, 32, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_entries_of_a_path_move_to_the_front_in_all_caches(dtype: torch.dtype) -> None:
    """Keys and values of different sizes, two sequences; a source is overwritten by a later move."""
    caches = [torch.randn(9, 3, 4, dim, device=DEVICE).to(dtype) for dim in (8, 12) * 3]
    moves = [(1, 1, 1, 0), (1, 3, 1, 1), (2, 1, 1, 2), (2, 2, 1, 3), (5, 3, 5, 0)]
    wanted = [cache.clone() for cache in caches]
    compaction.move_entries(wanted, moves)
    move_entries(caches, moves)
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache, expected)
