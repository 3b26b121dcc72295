"""The check of attention kernels: right ones pass in every precision, and a fault in few rows or entries shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.attention import PagedBatch
from engine.batch import Batch
from engine.cuda import attention as triton
from engine.layers import LayerShape
from engine.loading import acceleration, kernel_check
from engine.native import attention as native
from engine.plan import BatchPlan

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")
Fault = Callable[[BatchPlan], BatchPlan]


def shape(dtype: torch.dtype = torch.float32, window: int | None = None) -> LayerShape:
    return LayerShape(nn.Identity(), 4, 2, 16, 24, dtype, window, None)


def difference(kernels: Any, *shapes: LayerShape, device: torch.device = CPU) -> str | None:
    return kernel_check.difference(kernels, shapes, block_size=16, device=device)


def with_fault(fault: Fault) -> Any:
    def paged_attention(query: Tensor, k: Tensor, v: Tensor, plan: BatchPlan, *rest: Any) -> Tensor:
        return native.paged_attention(query, k, v, fault(plan), *rest)

    return SimpleNamespace(paged_attention=paged_attention, write_kv=native.write_kv)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_pass(dtype: torch.dtype, window: int | None) -> None:
    assert difference(native, shape(dtype, window), shape(dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)])
def test_kernels_for_a_gpu_pass_with_entries_split(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num_splits, of = [], triton.Launch.of

    def watched(*args: Any, **options: Any) -> triton.Launch:
        launch = of(*args, **options)
        num_splits.append(launch.num_splits)
        return launch

    monkeypatch.setattr(triton.Launch, "of", watched)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert difference(triton, shape(dtype), device=device) is None
    assert len(num_splits) == 4 or device.type == "cuda", "every variant is checked there"
    assert num_splits[1] > 2, "a row after a long text"
    assert num_splits[3] == 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (7, 7), (16, 1)])
def test_on_a_gpu_every_variant_is_compiled_at_load(heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever batch comes later: the launches of many more are among those of the check."""
    multiprocessors = 132
    num_programs = 4 * multiprocessors

    def variants(batches: Iterable[BatchPlan]) -> set[tuple[int, int, bool, bool]]:
        found = set()
        for plan in batches:
            launch = triton.Launch.of(
                plan, num_heads=heads, num_kv_heads=kv_heads, dim=128, itemsize=2, num_programs=num_programs
            )
            found.add((launch.tile_m, launch.tile_n, launch.num_splits > 1, plan.ancestors is not None))
        return found

    shape = LayerShape(nn.Identity(), heads, kv_heads, 128, 128, torch.float32, None, None)
    seen: list[BatchPlan] = []

    def distance(kernels: Any, shape: LayerShape, batch: PagedBatch, caches: Any) -> float:
        seen.append(batch.batch.plan)
        return 0.0

    monkeypatch.setattr(kernel_check, "_distance", distance)
    monkeypatch.setattr(Batch, "to", lambda batch, device: batch)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *_: tensor)
    kernel_check.difference(triton, [shape], block_size=32, device=torch.device("cuda"))  # type: ignore[arg-type]
    monkeypatch.undo()
    later = [
        plan_of(rows, sequences, kv_len, is_tree=is_tree)
        for rows in (1, 2, 3, 5, 8, 17, 33, 65, 512)
        for sequences in (1, 2, 7, 40, 300)
        for kv_len in (rows, rows + 700, rows + 100_000)
        for is_tree in ((False, True) if rows < 66 else (False,))
    ]
    assert variants(later) <= variants(seen)
    assert len(variants(seen)) >= 8


def plan_of(rows: int, sequences: int, kv_len: int, *, is_tree: bool) -> BatchPlan:
    positions, sizes = torch.zeros(rows * sequences, dtype=torch.int64), torch.zeros(sequences + 1, dtype=torch.int32)
    ancestors = positions if is_tree else None
    return BatchPlan(positions, positions, sizes, sizes[None], sizes[1:], kv_len, rows, 32, ancestors)


def _one_entry_less(plan: BatchPlan) -> BatchPlan:
    return replace(plan, kv_lens=plan.kv_lens - (plan.kv_lens == 601).int(), positions=plan.positions)


def _one_bit(plan: BatchPlan) -> BatchPlan:
    """The tree's row 63 sees a sibling of its path in place of an ancestor."""
    if plan.ancestors is None:
        return plan
    changed = plan.ancestors.clone()
    changed[63] ^= 0b110
    return replace(plan, ancestors=changed)


FAULTS: dict[str, Fault] = {
    "a tree after a long text": _one_bit,
    "a row after a long text": _one_entry_less,
    "a chunk of a prompt": lambda plan: replace(
        plan, kv_lens=plan.kv_lens - ((plan.kv_lens == 83) * (plan.max_rows == 80)).int()
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_few_rows_is_seen(name: str, dtype: torch.dtype) -> None:
    found = difference(with_fault(FAULTS[name]), shape(dtype))
    assert found is not None
    assert found.startswith(f"{name}: a row of attention is off by")


def test_entries_that_are_not_written_are_seen() -> None:
    kernels = SimpleNamespace(paged_attention=native.paged_attention, write_kv=lambda *_: None)
    assert "is off by nan" in str(difference(kernels, shape()))


def test_every_shape_is_checked_and_alike_ones_once() -> None:
    seen = []

    def paged_attention(query: Tensor, *rest: Any) -> Tensor:
        seen.append(query.dtype)
        return native.paged_attention(query, *rest)

    kernels: Any = SimpleNamespace(paged_attention=paged_attention, write_kv=native.write_kv)
    assert difference(kernels, shape(), shape(torch.bfloat16), shape()) is None
    assert seen == [torch.float32] * 4 + [torch.bfloat16] * 4
    assert acceleration.checked("some", kernels, [shape()], 16, CPU) is kernels
