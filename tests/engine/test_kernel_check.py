"""The check of attention kernels: right ones pass in every precision, and a fault in few rows or entries shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.cuda import attention as triton
from engine.layers import LayerShape
from engine.loading import acceleration, kernel_check
from engine.native import attention as native
from engine.plan import BatchPlan

CPU = torch.device("cpu")
Fault = Callable[[BatchPlan], BatchPlan]


def shape(dtype: torch.dtype = torch.float32, window: int | None = None) -> LayerShape:
    return LayerShape(nn.Identity(), 4, 2, 16, 24, dtype, window, None)


def difference(kernels: Any, *shapes: LayerShape) -> str | None:
    return kernel_check.difference(kernels, shapes, block_size=16, device=CPU)


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
    assert difference(triton, shape(dtype)) is None
    assert len(num_splits) == 4
    assert num_splits[1] > 2, "a row after a long text"
    assert num_splits[3] == 1


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
