"""Experts on packed weights: transformers' answers, and a row is the same in any company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.native.experts import pack_experts

pytestmark = pytest.mark.usefixtures("kernels")


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


@pytest.mark.parametrize("name", ["qwen3_next", "granite4_moe", "lfm2_moe", "jamba", "kimi_linear"])
def test_rows_are_transformers_and_the_same_in_any_company(name: str, tools: SimpleNamespace) -> None:
    model = tools.build(name)
    found = experts_of(model)
    x = torch.randn(40, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    scores = torch.rand(40, found[0].num_experts, generator=torch.Generator().manual_seed(2))
    weights, chosen = scores.topk(2, dim=-1)
    with torch.inference_mode():
        wanted = [module(x, chosen, weights) for module in found]
        assert pack_experts(model, 1) == len(found) > 0
        for module, before in zip(found, wanted, strict=True):
            rows = module(x, chosen, weights)
            torch.testing.assert_close(rows, before, atol=1e-4, rtol=1e-4)
            parts = [module(*part) for part in zip(x.split(7), chosen.split(7), weights.split(7), strict=True)]
            assert torch.cat(parts).equal(rows)
            assert not module.down_proj.numel(), "the weights are not held twice"


def test_other_experts_are_left_alone(tools: SimpleNamespace) -> None:
    """gpt-oss has biases, and its gates lie between the rest."""
    model = tools.build("gpt_oss")
    before = [module.down_proj for module in experts_of(model)]
    assert pack_experts(model, 1) == 0
    assert all(module.down_proj is weight for module, weight in zip(experts_of(model), before, strict=True))
