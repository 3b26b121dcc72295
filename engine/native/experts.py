"""Experts of a mixture on packed weights: each is a linear layer of its own, so a row is the same in any company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.native.library import DTYPES, Memory, NativeLibrary, load
from engine.native.linears import Matrix, NativeLinear, group_bytes, pack_group
from engine.native.rounded import GroupedLinear
from engine.recurrent.even import run_evenly


class GroupedExperts(nn.Module):
    """Experts as linear layers of their own, in the place of a module that has all their weights in one tensor."""

    has_gate = True

    def __init__(self, module: Any, gate_up: Sequence[GroupedLinear], down: Sequence[GroupedLinear]) -> None:
        """Of ``module`` the activation between both layers is taken."""
        super().__init__()
        self._apply_gate = module._apply_gate
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Rows [T, H], of each its experts [T, k] and their weights, to [T, H]."""
        out: torch.Tensor = run_evenly(_run, self, self.gate_up, self.down, hidden_states, indices, weights)
        return out


def pack_experts(model: nn.Module, num_threads: int) -> int:
    """Pack the experts of a transformers model in place; returns how many modules hold some.

    Known are modules with the weights of all experts, [E, N, K] each, without biases.
    """
    library = load()
    found = [module for module in model.modules() if _is_known(module)] if library is not None else []
    with torch.inference_mode(False), torch.no_grad():
        for module in found:
            assert library is not None
            into, out = (_packed(library, module, name, num_threads) for name in (_first(module), "down_proj"))
            module.forward = partial(run_evenly, partial(_run, module, into, out))
    return len(found)


def _first(module: Any) -> str:
    """The name of the experts' first weight."""
    return "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"


def _is_known(module: Any) -> bool:
    if getattr(module, "is_transposed", True) or module.has_bias or module.has_post_expert_norm:
        return False
    weights = [getattr(module, name, None) for name in (_first(module), "down_proj")]
    return module.is_concatenated and all(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 and weight.dtype in DTYPES for weight in weights
    )


def _packed(library: NativeLibrary, module: nn.Module, name: str, num_threads: int) -> list[NativeLinear]:
    """The linear layers of all experts; the module's weight is freed."""
    weights: torch.Tensor = getattr(module, name).detach()
    matrices = [Matrix(weight) for weight in weights]
    memory = Memory(library, sum(group_bytes(library, [matrix]) for matrix in matrices))
    packed = [pack_group(library, memory, [matrix], num_threads)[0] for matrix in matrices]
    dtype = weights.dtype
    setattr(module, name, nn.Parameter(weights.new_empty(0), requires_grad=False))
    del matrices, weights
    return [NativeLinear(weight, dtype, None, num_threads) for weight in packed]


def _run(  # noqa: PLR0917 - ends with what transformers gives it
    module: Any,
    into: Sequence[nn.Module] | nn.ModuleList,
    out: Sequence[nn.Module] | nn.ModuleList,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Rows [T, H], of each its experts [T, k] and their weights, to [T, H]. A row adds up its experts in order."""
    total = torch.zeros_like(hidden_states)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        rows, places = (top_k_index == expert).nonzero(as_tuple=True)
        inner = into[expert](hidden_states[rows])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        total.index_add_(0, rows, (out[expert](inner) * top_k_weights[rows, places, None]).to(total.dtype))
    return total
