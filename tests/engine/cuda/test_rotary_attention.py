"""Attention with norms, rotary positions, new entries of the cache and rounding in one launch, against each alone."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cuda import rotary_attention as launches
from engine.cuda.float8 import Float8Rows, round_rows
from engine.cuda.rotary_attention import Around, rotary_attention
from engine.layers import LayerShape
from engine.loading import acceleration
from tests.engine.paged import CHAINS, Case, Shape, random_tree
from tests.pairwise import parametrize_pairwise

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
ONE, MANY = 1, 200  # programs: entries are not split at all, and into as many parts as there may be
TREES: list[list[Shape]] = [
    [(9, [-1, 0, 0, 1, 1, 2])],
    [(6, random_tree(8, 1)), (3, 5), (30, random_tree(6, 2)), (0, random_tree(7, 3)), (4, 1)],
]
EPS = 1e-5


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


def rotated(x: Tensor, around: Around) -> Tensor:
    """Heads [T, heads, D]."""
    low, high = x.chunk(2, dim=-1)
    return x * around.cosines[:, None] + torch.cat((-high, low), -1) * around.sines[:, None]


def prepared(case: Case, *, has_norms: bool = False) -> tuple[Tensor, Around]:
    """Queries, keys and values that become the case's query and new keys, which are replaced."""
    generator = torch.Generator().manual_seed(5)
    qkv = torch.cat([case.query, case.new_keys, case.new_values], 1).to(case.dtype)
    frequencies = 0.9 ** torch.arange(case.head_dim // 2, device=DEVICE)
    angles = torch.cat([case.plan.positions[:, None] * frequencies] * 2, 1)
    weights = [torch.randn(case.head_dim, generator=generator).to(DEVICE, case.dtype) for _ in range(2 * has_norms)]
    around = Around(angles.cos().to(case.dtype), angles.sin().to(case.dtype), *(weights or (None, None)), EPS)
    case.query, case.new_keys = (
        rotated(normed(x, weight), around)
        for x, weight in ((case.query, around.query_norm), (case.new_keys, around.key_norm))
    )
    rows = iter(case.new_keys.cpu())
    for (before, _), keys in zip(case.shapes, case.keys, strict=True):
        for own in keys[before:]:
            own.copy_(next(rows))
    return qkv, around


def attend(
    case: Case, qkv: Tensor, around: Around, monkeypatch: pytest.MonkeyPatch, programs: int, **options: object
) -> Tensor | Float8Rows:
    monkeypatch.setattr(launches, "programs_of", lambda device: programs)
    out = rotary_attention(qkv, case.k_cache, case.v_cache, case.plan, around, 0.4, **options)  # type: ignore[arg-type]
    assert not any(each.any() for each in launches._counters.of[qkv.device]), "left as they were"  # noqa: SLF001
    return out


def check(case: Case, out: Tensor | Float8Rows, window: int | None = None, tolerance: float = 1e-5) -> None:
    """The result, and the entries that were written."""
    assert isinstance(out, Tensor)
    expected = case.expected(scale=0.4, window=window)
    torch.testing.assert_close(out.view(expected.shape).cpu().double(), expected, atol=tolerance, rtol=tolerance)
    block, offset = case.plan.slots // case.block_size, case.plan.slots % case.block_size
    torch.testing.assert_close(case.k_cache[block, :, offset], case.new_keys, atol=tolerance, rtol=tolerance)
    assert torch.equal(case.v_cache[block, :, offset], case.new_values)


@parametrize_pairwise(
    {
        "shapes": CHAINS + TREES,
        "window": [None, 5, 40],
        "programs": [ONE, MANY],
        "has_norms": [False, True],
        "joins": [False, True],
    }
)
def test_it_equals_attention_by_hand(  # noqa: PLR0917
    shapes: list[Shape],
    window: int | None,
    programs: int,
    has_norms: bool,
    joins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(shapes, head_dim=8, value_dim=8, device=DEVICE)
    qkv, around = prepared(case, has_norms=has_norms)
    check(case, attend(case, qkv, around, monkeypatch, programs, window=window, joins=joins), window)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), [(7, 1, 24, 16), (3, 3, 34, 8)])
def test_any_shape_of_heads_and_blocks(
    heads: int, kv_heads: int, dim: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case([(403, 5), (130, 1), (0, 9)], heads, kv_heads, dim, dim, block_size, device=DEVICE)
    qkv, around = prepared(case)
    check(case, attend(case, qkv, around, monkeypatch, 70))


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [None, 9])
def test_a_tree_as_large_as_it_may_be_beside_a_long_chunk(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(21, random_tree(64, 4)), (2, 70), (70, 3)], 4, 1, 8, 8, device=DEVICE)
    qkv, around = prepared(case)
    check(case, attend(case, qkv, around, monkeypatch, ONE, window=window), window)


def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is rounded where the modules round it."""
    case = Case([(130, 5), (0, 20), (7, random_tree(9, 5))], 4, 2, 16, 16, 16, torch.float16, DEVICE)
    qkv, around = prepared(case, has_norms=True)
    check(case, attend(case, qkv, around, monkeypatch, 70), tolerance=6e-3)


@pytest.mark.parametrize(
    ("group", "programs", "joins"),
    [
        (256, 70, True),
        (128, ONE, True),
        *(
            pytest.param(group, programs, joins, marks=pytest.mark.exhaustive)
            for group in (256, 128, 64)
            for programs in (ONE, MANY)
            for joins in (True, False)
        ),
    ],
)
def test_the_result_is_rounded(group: int, programs: int, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter drops a carry, and halves the number."""
    case = Case([(130, 3), (0, 5), (7, random_tree(9, 5))], 4, 2, 64, 64, 16, device=DEVICE)
    qkv, around = prepared(case)
    plain = attend(case, qkv, around, monkeypatch, programs, joins=joins)
    assert isinstance(plain, Tensor)
    found = attend(case, qkv, around._replace(rounded_group=group), monkeypatch, programs, joins=joins)
    assert isinstance(found, Float8Rows)
    wanted = round_rows(plain, group)
    assert found.scales.stride() == wanted.scales.stride()
    torch.testing.assert_close(found.scales, wanted.scales)
    assert (found.codes.float() != wanted.codes.float()).float().mean() < 0.05
    assert (found.codes.float().abs() <= wanted.codes.float().abs() * 1.2).all()


@pytest.mark.parametrize("programs", [ONE, MANY])
def test_padding_disturbs_nobody_and_comes_out_zero(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph's batch: two sequences in use, one without rows, and one that takes the rows left over."""
    case, rows = Case([(19, 3), (40, 1)], head_dim=8, value_dim=8, device=DEVICE), 9
    qkv, around = prepared(case)
    plan = case.plan
    tables = torch.full((4, 30), 10**6, dtype=torch.int32, device=DEVICE)  # mostly never looked at
    tables[:2, : plan.block_tables.shape[1]] = plan.block_tables
    padded = replace(
        plan,
        positions=torch.cat([plan.positions, plan.positions.new_zeros(rows - 4)]),
        slots=torch.cat([plan.slots, plan.slots.new_zeros(rows - 4)]),
        row_starts=torch.tensor([0, 3, 4, 4, rows], dtype=torch.int32, device=DEVICE),
        block_tables=tables,
        kv_lens=torch.tensor([22, 41, 10**6, 0], dtype=torch.int32, device=DEVICE),
        max_kv_len=120,
        max_rows=rows,
    )
    many = torch.cat([qkv, qkv.new_full((rows - 4, *qkv.shape[1:]), 7.0)])
    longer = around._replace(cosines=around.cosines.repeat(3, 1)[:rows], sines=around.sines.repeat(3, 1)[:rows])
    monkeypatch.setattr(launches, "programs_of", lambda device: programs)
    out = rotary_attention(many, case.k_cache, case.v_cache, padded, longer, 0.4)
    assert isinstance(out, Tensor)
    check(case, out[:4])
    assert not out[4:].any()


def test_caches_may_have_more_numbers_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(6, 5), (30, 1)], head_dim=8, value_dim=8, dtype=torch.float16, device=DEVICE)
    qkv, around = prepared(case)
    stride = 2**31 // (int(case.plan.slots.max()) // case.block_size) + 1  # so that the last block lies behind 2**31
    storage = torch.empty(stride * case.k_cache.shape[0], dtype=torch.float16, device=DEVICE)  # hardly ever touched
    for name, offset in (("k_cache", 0), ("v_cache", stride // 2)):
        cache = getattr(case, name)
        setattr(case, name, storage.as_strided(cache.shape, (stride, *cache.stride()[1:]), offset).copy_(cache))
    for programs in (ONE, MANY):
        check(case, attend(case, qkv, around, monkeypatch, programs), tolerance=6e-3)


def test_each_thread_counts_by_itself() -> None:
    """Its launches run beside those of others; what a graph reads is kept when more is needed."""
    device, found = torch.device(DEVICE), []
    first = launches._zeros(device, 1)  # noqa: SLF001
    thread = threading.Thread(target=lambda: found.append(launches._zeros(device, 1)))  # noqa: SLF001
    thread.start()
    thread.join()
    assert found[0].data_ptr() != first.data_ptr()
    more = launches._zeros(device, len(first) + 1)  # noqa: SLF001
    assert len(more) > len(first)
    assert launches._zeros(device, 1) is more  # noqa: SLF001
    assert any(each is first for each in launches._counters.of[device])  # noqa: SLF001


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        ((True,), False),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (((), True), ((True, False), None))),
    ],
)
def test_a_decoder_gets_what_is_right_at_load(
    faulty: tuple[bool, ...], expected: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A join that does not see what other programs wrote is left to a launch of its own."""
    attend_all = launches.rotary_attention

    def attend_some(*given: Any, joins: bool) -> Tensor:
        out = attend_all(*given, joins=joins)
        assert isinstance(out, Tensor)
        return out.index_fill_(0, torch.tensor([0], device=out.device), 1.0) if joins in faulty else out

    monkeypatch.setattr(launches, "rotary_attention", attend_some)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16}
    shape = LayerShape(module=torch.nn.Identity(), **sizes, dtype=torch.float32, window=None, chunk=None)
    fused: Any = SimpleNamespace()
    found = acceleration.with_checked_attention(fused, [shape], 16, torch.device(DEVICE))
    assert (None if found is None else found.joins) == expected
    assert caplog.text.count("is not used: a tree after a long text: a row of attention is off") == len(faulty)
