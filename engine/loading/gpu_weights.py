"""Quantised checkpoints on a GPU: layers of 4 bits stay so where there is a product for them, others are decoded."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.cuda import int4
from engine.cuda.int4 import Int4Linear
from engine.native.rounded import GroupedLinear
from specdec.errors import ModelNotSupported

logger = logging.getLogger(__name__)

#: The first GPUs with products of bfloat16, Ampere's.
_LEAST_CAPABILITY: Final = (8, 0)
#: Distance of a layer's outputs from those of its decoded weight, relative to the largest of the row.
_BOUND: Final = 3e-2


def place(model: nn.Module, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Put the model's grouped layers on ``device``, in place; the rest is left to the caller.

    With a ``dtype`` other than bfloat16 all are decoded; so they are where the product is wrong or missing.

    Raises:
        ModelNotSupported: the GPU is too old.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        raise ModelNotSupported(
            f"{name} holds quantised weights, which need a GPU of compute capability 8.0 or newer; this one has"
            f" {capability[0]}.{capability[1]}: set device to cpu, or take the checkpoint that is not quantised"
        )
    reasons: Counter[str] = Counter()
    fault: str | None = None if dtype == torch.bfloat16 else f"the dtype is {str(dtype).removeprefix('torch.')}"
    is_checked = False
    layers = [(parent, own, layer) for parent in list(model.modules()) for own, layer in parent.named_children()]
    for parent, own, layer in layers:
        if not isinstance(layer, GroupedLinear) or layer.grouped is None:
            continue
        weight = layer.grouped
        reason = fault or int4.unknown(weight)
        if reason is None:
            made = Int4Linear.of(weight, layer.bias, device)
            if not is_checked:
                fault, is_checked = _difference(made, layer, device), True
                reason = fault
            if reason is None:
                parent._modules[own] = made
                layer.grouped = None
                continue
        reasons[reason] += 1
        parent._modules[own] = _decoded(layer, dtype, device)
        layer.grouped = None
    if reasons:
        why = "; ".join(f"{count} for {reason}" for reason, count in reasons.items())
        logger.warning("%s: %d layers are decoded to %s: %s", name, reasons.total(), dtype, why)


def _decoded(layer: GroupedLinear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    assert layer.grouped is not None
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.grouped.decode().to(device, dtype), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
    return plain


def _difference(made: Int4Linear, layer: GroupedLinear, device: torch.device) -> str | None:
    """What is wrong with a layer beside its decoded weight; None: nothing."""
    assert layer.grouped is not None
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, layer.in_features, generator=generator).bfloat16()
    bias: Any = layer.bias
    wanted: Tensor = nn.functional.linear(x.float(), layer.grouped.decode(), None if bias is None else bias.float())
    try:
        found = made(x.to(device)).float().cpu()
    except Exception as error:  # what a build of torch lacks, it says in many ways
        return f"{type(error).__name__}: {error}"
    distance = float(((found - wanted).abs().amax(1) / wanted.abs().amax(1)).max())
    return None if distance <= _BOUND else f"torch's product of 4 bits is off by {distance:.2g}"
