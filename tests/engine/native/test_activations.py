"""Elementwise functions of the kernels: torch's values, and the same bits wherever an element stands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.native.activations import EvenActivations

CALLS = [F.silu, nn.SiLU(), torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, F.softplus, F.gelu]
EXTREMES = torch.tensor([-1e4, -100.0, -20.0, -1e-6, 0.0, 1e-6, 19.9, 20.1, 100.0, 1e4])


@pytest.mark.parametrize("call", CALLS, ids=lambda call: getattr(call, "__name__", "SiLU"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_torchs_and_do_not_depend_on_the_place(call: nn.Module, dtype: torch.dtype) -> None:
    x = torch.cat((EXTREMES, 4 * torch.randn(40_000, generator=torch.Generator().manual_seed(1)))).to(dtype)
    with EvenActivations():
        found = call(x)
        parts = torch.cat([call(part) for part in x.split(37)])
        columns = call(x[:37_010].view(-1, 10).t()).t().flatten()
    assert found.dtype == dtype
    torch.testing.assert_close(found, call(x), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(parts, found)
    assert torch.equal(columns, found[:37_010])


def test_torchs_own_depend_on_the_place() -> None:
    """Else the kernels would be of no use."""
    x = 4 * torch.randn(4000, generator=torch.Generator().manual_seed(1))
    assert any(not torch.equal(torch.cat([call(part) for part in x.split(37)]), call(x)) for call in CALLS)


def test_other_calls_are_torchs() -> None:
    x = torch.randn(8)
    with EvenActivations():
        assert torch.equal(F.softplus(x, 2.0), F.softplus(x, beta=2.0))
        assert torch.equal(F.silu(x.double()).float(), (x.double() * torch.sigmoid(x.double())).float())
        assert torch.equal(torch.tanh(x), x.tanh())
