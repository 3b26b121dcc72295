"""The bias of linear layers that are joined to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def join_biases(layers: Sequence[Any]) -> Tensor | None:
    """One bias of several linear layers, zeros where one has none; None where none has one."""
    given = next((layer.bias.detach() for layer in layers if layer.bias is not None), None)
    if given is None:
        return None
    return torch.cat([given.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in layers])
