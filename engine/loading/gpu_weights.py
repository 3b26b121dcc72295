"""Quantised checkpoints on a GPU: layers of 4 bits and of e4m3 stay so where torch has a product for them, others are
decoded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn

from engine.cuda import float8, int4
from engine.cuda.float8 import Float8Linear
from engine.cuda.int4 import Int4Linear
from engine.device import capability_of
from engine.native.rounded import GroupedLinear
from specdec.errors import ModelNotSupported

logger = logging.getLogger(__name__)

#: The first GPUs with products of bfloat16, Ampere's.
_LEAST_CAPABILITY: Final = (8, 0)
Product: TypeAlias = Int4Linear | Float8Linear
#: Distance of a layer's outputs from those of its decoded weight, relative to the row's: e4m3 rounds an activation by
#: 6 % at most.
_BOUNDS: Final = {Int4Linear: 3e-2, Float8Linear: 6e-2}
_CHECKED_ROWS: Final = (1, 5, 33, 80)


def place(model: nn.Module, dtype: torch.dtype, device: torch.device, name: str, *, rounds: bool = True) -> None:
    """Put the model's grouped layers on ``device``, in place; the rest is left to the caller.

    With a ``dtype`` other than bfloat16 all are decoded; so they are where the product is wrong or missing, and without
    ``rounds`` where it rounds activations.

    Raises:
        ModelNotSupported: the GPU is too old.
    """
    capability = capability_of(device)
    if capability is not None and capability < _LEAST_CAPABILITY:
        raise ModelNotSupported(
            f"{name} holds quantised weights, which need a GPU of compute capability 8.0 or newer; this one has"
            f" {capability[0]}.{capability[1]}: set device to cpu, or take the checkpoint that is not quantised"
        )
    reasons: Counter[str] = Counter()
    faults: dict[Hashable, str | None] = {}  # of products, and of each with a shape that was tried
    if dtype != torch.bfloat16:
        faults |= dict.fromkeys((Int4Linear, Float8Linear), f"the dtype is {str(dtype).removeprefix('torch.')}")
    elif not rounds:
        faults[Float8Linear] = "activations are not to be rounded"
    elif capability is not None and capability < float8.LEAST_CAPABILITY:
        faults[Float8Linear] = f"e4m3 needs compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}"
    layers = [(parent, own, layer) for parent in list(model.modules()) for own, layer in parent.named_children()]
    for parent, own, layer in layers:
        if isinstance(layer, GroupedLinear) and layer.grouped is not None:
            made = _product(layer, device, faults)
            if isinstance(made, str):
                reasons[made] += 1
            parent._modules[own] = _decoded(layer, dtype, device) if isinstance(made, str) else made
            layer.grouped = None
    if reasons:
        why = "; ".join(f"{count} for {reason}" for reason, count in reasons.items())
        logger.warning("%s: %d layers are decoded to %s: %s", name, reasons.total(), dtype, why)


def _product(layer: GroupedLinear, device: torch.device, faults: dict[Hashable, str | None]) -> Product | str:
    """A layer that multiplies by the codes, or why there is none; the first of each shape is checked."""
    assert layer.grouped is not None
    is_float8 = layer.grouped.codes.dtype == torch.float8_e4m3fn
    product, unknown = (Float8Linear, float8.unknown) if is_float8 else (Int4Linear, int4.unknown)
    shape = product, layer.out_features, layer.in_features, layer.grouped.group
    if (reason := faults.get(product) or faults.get(shape) or unknown(layer.grouped)) is not None:
        return reason
    try:
        made: Product = product.of(layer.grouped, layer.bias, device)
        if shape not in faults:
            faults[shape] = _difference(made, layer, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # what a build of torch lacks, it says in many ways
        faults[shape] = f"{type(error).__name__}: {error}"
    return faults[shape] or made


def _decoded(layer: GroupedLinear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    assert layer.grouped is not None
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(layer.grouped.decode().to(device, dtype), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to(device, dtype), requires_grad=False)
    return plain


def _difference(made: Product, layer: GroupedLinear, device: torch.device) -> str | None:
    """What is wrong with a layer beside its decoded weight; None: nothing."""
    assert layer.grouped is not None
    bias, weight = layer.bias, layer.grouped.decode()
    for num_rows in _CHECKED_ROWS:
        x = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(3)).bfloat16()
        wanted: Tensor = nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        found = made(x.to(device)).float().cpu()
        distance = float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
        if not distance <= _BOUNDS[type(made)]:
            return f"torch's product is off by {distance:.2g}"
    return None
