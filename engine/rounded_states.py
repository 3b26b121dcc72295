"""Hidden states in int8 with a scale for each group of numbers, as in :class:`specdec.types.HiddenStates`."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from specdec.state_dtypes import SCALE_BYTES
from specdec.types import HiddenStates

_LIMIT: Final = 127


def round_states(states: Tensor, group_size: int) -> Tensor:
    """[..., H] to uint8 [..., H / group_size * (group_size + 4)]: of each group x its numbers round(x / scale) and the
    scale, float32 max(|x|) / 127.
    """
    groups = states.float().view(*states.shape[:-1], -1, group_size)
    scales = groups.abs().amax(-1, keepdim=True) / _LIMIT
    numbers = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), -1).flatten(-2)


def tensor_of_states(states: HiddenStates) -> Tensor:
    """[positions, features] on the CPU: of the type they arrived in, of int8 in float32."""
    data = bytearray(states.data)
    if not states.group_size:
        return torch.frombuffer(data, dtype=getattr(torch, states.dtype)).view(-1, states.num_features)
    groups = torch.frombuffer(data, dtype=torch.uint8).view(states.num_positions, -1, states.group_size + SCALE_BYTES)
    numbers, scales = groups[..., :-SCALE_BYTES].view(torch.int8), groups[..., -SCALE_BYTES:].contiguous()
    return (numbers * scales.view(torch.float32)).flatten(1)
