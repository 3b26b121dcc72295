"""Linear layers on rounded weights, before they are packed; run by themselves, what packed ones are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.cuda.float8 import Float8Linear
from engine.cuda.int4 import Int4Linear
from engine.freed_memory import give_back_freed
from engine.grouped_weight import GroupedWeight, round_to_4_bits, round_to_8_bits
from engine.layers import is_kept_as_it_is
from engine.native.library import DTYPES
from engine.trimmed_outputs import output_linear

_INT8_MAX: Final = 127
#: Activations that share a scale: kRun of grouped.h.
_RUN: Final = 64


class PackedLinear(nn.Module):
    """What replaces a linear layer. The weight itself is gone: ``weight`` is empty and tells only the dtype."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = torch.empty(0, dtype=dtype)
        self.bias = bias

    def extra_repr(self) -> str:
        """As torch's own linear layer prints itself."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(PackedLinear):
    """A linear layer whose weight is rounded to 8 bits, before it is packed.

    Run by itself it multiplies by the rounded weight in the layer's dtype, slowly.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Round a weight [N, K] to whole multiples of a scale per output feature, the largest to 127 or -127."""
        super().__init__(weight.shape[1], weight.shape[0], weight.dtype, bias)
        exact = weight.detach().float()
        scales = exact.abs().amax(1) / _INT8_MAX
        self.scales = scales.where(scales > 0, 1.0)  # [N]
        self.quantised = (exact / self.scales[:, None]).round().to(torch.int8)  # [N, K]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        return F.linear(x, (self.quantised * self.scales[:, None]).to(self.weight.dtype), self.bias)


class GroupedLinear(PackedLinear):
    """A linear layer on a :class:`~engine.grouped_weight.GroupedWeight`, before it is packed.

    Run by itself it multiplies activations, rounded if the kernels round them, by the decoded weight, slowly.
    """

    def __init__(self, grouped: GroupedWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> None:
        super().__init__(grouped.in_features, grouped.out_features, dtype, bias)
        self.grouped: GroupedWeight | None = grouped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        assert self.grouped is not None
        if not self.grouped.rounds:
            y = self.grouped.multiply(x)
            give_back_freed(self.in_features * self.out_features)
            return y if self.bias is None else y + self.bias
        order = self.grouped.order
        rounded = round_activations(x if order is None else x[..., order])
        fed = rounded if order is None else rounded[..., order.argsort()]
        y = self.grouped.multiply(fed)
        give_back_freed(self.in_features * self.out_features)
        return (y if self.bias is None else y + self.bias.float()).to(self.weight.dtype)


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """Activations [..., K] as products with grouped weights take them (gemm.h), float32: of every 64 neighbours the
    largest magnitude becomes 127 steps.
    """
    padded = F.pad(x.float(), (0, -x.shape[-1] % _RUN))
    runs = padded.reshape(*x.shape[:-1], -1, _RUN)
    peaks = runs.abs().amax(-1, keepdim=True)
    inverses = (torch.full_like(peaks, _INT8_MAX) / peaks).where(peaks > 0, 0.0)
    rounded = (runs * inverses).round() * (peaks / _INT8_MAX)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def quantise_linears(model: nn.Module, bits: int = 8) -> int:
    """Replace the model's plain linear layers (and ``Conv1D``) on the CPU by rounded ones, in place.

    Of a language model they are :class:`GroupedLinear`: 8 bits have a scale per output, 4 bits one per group, but 8 in
    the output layer, where 4 cost more than they save. Of a draft head they are :class:`Int8Linear`: what a head reads
    was not normed, and may have a few large numbers beside many small ones. Embeddings, norms and biases stay as they
    are; an output layer that shares the embedding's weight gets its own. Returns how many layers were replaced.
    """
    output = output_linear(model) if isinstance(model, PreTrainedModel) else None

    def rounded(layer: Any) -> PackedLinear:
        weight = plain_weight(layer)
        if not isinstance(model, PreTrainedModel):
            return Int8Linear(weight, layer.bias)
        return GroupedLinear(round_weight(weight, bits, is_output=layer is output), weight.dtype, layer.bias)

    return replace_linears(model, rounded)


def round_weight(
    weight: torch.Tensor, bits: int, *, is_output: bool, dtype: torch.dtype | None = None
) -> GroupedWeight:
    """A weight [N, K] of a language model, taken in a dtype, rounded; ``is_output``: it is that of the output layer."""
    if bits == 8:
        return round_to_8_bits(weight, weight.shape[1], dtype)
    return round_to_8_bits(weight, dtype=dtype) if is_output else round_to_4_bits(weight, dtype=dtype)


def group_linears(model: nn.Module, *, rounds: bool) -> None:
    """Make the plain linear layers of a model like those that are grouped already: rounded to 8 bits in groups or,
    unless activations are rounded, kept as they are.

    Without ``rounds``, or where a layer's codes are real numbers, no layer of the model rounds activations.
    """
    grouped = [module for module in model.modules() if isinstance(module, GroupedLinear) and module.grouped is not None]
    rounds &= all(module.grouped is not None and module.grouped.rounds for module in grouped)
    make = round_to_8_bits if rounds else GroupedWeight.plain
    for module in grouped:
        assert module.grouped is not None
        module.grouped = replace(module.grouped, rounds=rounds)
    replace_linears(model, lambda layer: GroupedLinear(make(plain_weight(layer)), layer.weight.dtype, layer.bias))


def rounded_bytes(model: nn.Module) -> int:
    """Bytes of the rounded weights of a model's layers."""
    total = 0
    for module in model.modules():
        if isinstance(module, Int8Linear):
            total += module.quantised.nbytes + module.scales.nbytes
        elif isinstance(module, GroupedLinear) and module.grouped is not None:
            total += module.grouped.nbytes
    return total


def grouped_numbers(model: PreTrainedModel) -> int:
    """How many weights a model has in groups: torch does not count them among its parameters. Those of an output layer
    that is tied to the embedding are counted there.
    """
    tied = output_linear(model) if model.config.tie_word_embeddings else None
    layers = [m for m in model.modules() if isinstance(m, GroupedLinear | Int4Linear | Float8Linear) and m is not tied]
    return sum(layer.in_features * layer.out_features for layer in layers)


def replace_linears(model: nn.Module, make: Callable[[Any], PackedLinear]) -> int:
    """Replace the model's plain linear layers by others, each weight freed on the way; returns how many there were."""
    done: dict[int, tuple[Any, PackedLinear]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for parent, name in places(model):
            layer: Any = parent._modules[name]
            if id(layer) not in done:
                done[id(layer)] = layer, make(layer).train(layer.training)
                layer.weight = None
            parent._modules[name] = done[id(layer)][1]
    return len(done)


def plain_weight(layer: Any) -> torch.Tensor:
    """The weight [N, K] of a plain linear layer."""
    weight: torch.Tensor = layer.weight
    return weight.t() if isinstance(layer, Conv1D) else weight


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is exactly a linear layer whose weight may be packed."""
    return (
        type(layer) in (nn.Linear, Conv1D)
        and not is_kept_as_it_is(layer)
        and isinstance(layer.weight, torch.Tensor)
        and layer.weight.device.type == "cpu"
        and layer.weight.layout is torch.strided
        and layer.weight.dtype in DTYPES
        and layer.weight.numel() > 0
        and (layer.bias is None or isinstance(layer.bias, torch.Tensor))
    )


def places(model: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> list[tuple[nn.Module, str]]:
    """Every place (parent, name) where a plain linear layer or one of other types stands."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and (is_plain(child) or isinstance(child, others))
    ]
