"""Linear layers with weights of 4 bits on a GPU, by torch's own product (tinygemm).

It means ``w = (code - 8) · scale + zero`` with a scale and a zero in bfloat16 for each group of inputs, and reads a
quarter of the bytes of bfloat16. Weights of other forms are not for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import torch
from torch import Tensor, nn

from engine.cuda.joined_biases import join_biases
from engine.grouped_weight import GroupedWeight, unpack_nibbles

#: Inputs of a group that the product knows.
GROUPS: Final = (32, 64, 128, 256)
#: Tiles of 16 inputs that a thread holds; inputs come in whole ones.
_INNER_TILES: Final = 8
#: Outputs come in whole tiles of so many.
_OUTPUTS: Final = 16


def unknown(weight: GroupedWeight) -> str | None:
    """Why a weight is not one that the product knows, or None."""
    if weight.table is None:
        return "codes of 8 bits"
    if not torch.equal(weight.table.diff(), torch.ones(15, dtype=weight.table.dtype)):
        return "codes that are no whole numbers"
    inputs, outputs = weight.in_features, weight.out_features
    if weight.group not in GROUPS or inputs % weight.group or inputs % (16 * _INNER_TILES) or outputs % _OUTPUTS:
        return f"{weight.out_features} x {weight.in_features} weights in groups of {weight.group}"
    return None


class Int4Linear(nn.Module):
    """A linear layer on a :class:`~engine.grouped_weight.GroupedWeight`; bfloat16 in and out."""

    packed: Tensor
    scales_and_zeros: Tensor
    order: Tensor | None

    def __init__(
        self, packed: Tensor, scales_and_zeros: Tensor, group: int, order: Tensor | None, bias: Tensor | None
    ) -> None:
        """``packed`` as the device's product wants it; ``scales_and_zeros`` bfloat16 [groups, N, 2]."""
        super().__init__()
        self.out_features = scales_and_zeros.shape[1]
        self.in_features = scales_and_zeros.shape[0] * group
        self.group = group
        for name, tensor in (("packed", packed), ("scales_and_zeros", scales_and_zeros), ("order", order)):
            self.register_buffer(name, tensor)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Self:
        """A layer on ``device`` with a weight that :func:`unknown` has nothing against."""
        assert weight.table is not None
        first = int(weight.table[0])  # code 0 stands for it
        zeros = weight.scales * (8 + first)
        if weight.offsets is not None:
            zeros = zeros - weight.offsets
        both = torch.stack([weight.scales, zeros], 2).transpose(0, 1).contiguous().bfloat16()
        codes = unpack_nibbles(weight.codes)[:, : weight.in_features]
        if device.type == "cpu":
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), _INNER_TILES)
        else:
            pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(device)
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, _INNER_TILES)
        order = None if weight.order is None else weight.order.long().to(device)
        bias = None if bias is None else bias.detach().to(device, torch.bfloat16)
        return cls(packed, both.to(device), weight.group, order, bias)

    @classmethod
    def join(cls, layers: Sequence[Int4Linear]) -> Self:
        """A layer with the outputs of several of one group and order, whose weights are views of its from now on."""
        packed, both = (torch.cat([x.packed for x in layers]), torch.cat([x.scales_and_zeros for x in layers], 1))
        for layer, part in zip(layers, packed.split([len(x.packed) for x in layers]), strict=True):  # type: ignore[no-untyped-call]
            layer.packed = part
        return cls(packed, both, layers[0].group, layers[0].order, join_biases(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm_for_cpu if rows.device.type == "cpu" else aten._weight_int4pack_mm
        y: Tensor = multiply(rows.contiguous(), self.packed, self.group, self.scales_and_zeros)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
