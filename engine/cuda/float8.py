"""Linear layers with weights of 8 bits (e4m3) on a GPU, by torch's own product.

It multiplies codes by codes, so activations are rounded, too: the largest magnitude becomes 448, of every 128 inputs
of a row (on Hopper, and where weights have a scale per block) or of every row. What a row becomes does not depend on
others.

Weights with a scale per output are multiplied on Hopper as if each block had it. An H200 took for up to 33 rows 17 us
in place of 33 with 4096 x 11008 weights, 28 in place of 41 with 22016 x 4096 (bfloat16: 29, 49); for 128 rows 19 in
place of 31, and 47 of 35 (32, 52).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from engine.cuda.joined_biases import join_biases
from engine.device import capability_of, has_triton
from engine.grouped_weight import GroupedWeight

#: The first GPUs with the product, Ada's.
LEAST_CAPABILITY: Final = (8, 9)
#: The only ones for which cuBLAS multiplies blocks.
HOPPER: Final = (9, 0)
#: Inputs of a block that the product knows.
BLOCK: Final = 128
#: Inputs and outputs come in whole tiles of so many.
_TILE: Final = 16
#: With scales per block cuBLAS takes rows and outputs in multiples of so many, and only on Hopper (its documentation,
#: "128-element 1D and 128x128 2D block scaling for FP8 data types").
ROW_TILE: Final = 4
_LARGEST: Final = 448.0


class Float8Rows(NamedTuple):
    """Rounded activations; with several groups they are the first rows of buffers of whole :data:`ROW_TILE`."""

    #: e4m3 [T, K].
    codes: Tensor
    #: float32 [T, groups], of which rows are neighbours.
    scales: Tensor

    def padded(self) -> Float8Rows:
        """All rows of the buffers; those behind the real ones hold anything."""
        num_inputs, num_groups = self.codes.shape[1], self.scales.shape[1]
        if num_groups == 1:
            return self
        num_rows = self.scales.stride(1)
        return Float8Rows(
            self.codes.as_strided((num_rows, num_inputs), (num_inputs, 1)),
            self.scales.as_strided((num_rows, num_groups), (1, num_rows)),
        )


def unknown(weight: GroupedWeight) -> str | None:
    """Why a weight is not one that the product knows, or None."""
    if weight.codes.dtype != torch.float8_e4m3fn:
        return "codes other than e4m3"
    is_known = weight.num_groups == 1 or (weight.group == BLOCK and weight.in_features % BLOCK == 0)
    if not is_known or weight.in_features % _TILE or weight.out_features % _TILE:
        return f"{weight.out_features} x {weight.in_features} weights in groups of {weight.group}"
    return None


class Float8Linear(nn.Module):
    """A linear layer on a :class:`~engine.grouped_weight.GroupedWeight`; bfloat16 in and out."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """``codes`` e4m3 [N, K]; ``scales`` float32 [groups, N], one group or K / 128."""
        super().__init__()
        self.out_features, self.in_features = codes.shape
        #: Inputs that share a scale.
        self.group = self.in_features // len(scales)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, weight: GroupedWeight, bias: Tensor | None, device: torch.device) -> Self:
        """A layer on ``device`` with a weight that :func:`unknown` has nothing against."""
        bias = None if bias is None else bias.detach().to(device, torch.bfloat16)
        scales = weight.scales.t()
        if len(scales) == 1 and weight.in_features % BLOCK == 0 and capability_of(device) == HOPPER:
            scales = scales.expand(weight.in_features // BLOCK, -1)
        return cls(weight.codes.to(device), scales.contiguous().to(device), bias)

    @classmethod
    def join(cls, layers: Sequence[Float8Linear]) -> Self:
        """A layer with the outputs of several of one group, whose weights are views of its from now on."""
        codes = torch.cat([layer.codes for layer in layers])
        for layer, part in zip(layers, codes.split([layer.out_features for layer in layers]), strict=True):  # type: ignore[no-untyped-call]
            layer.codes = part
        return cls(codes, torch.cat([layer.scales for layer in layers], 1), join_biases(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = round_rows(x.reshape(-1, self.in_features), self.group)
        return self.multiply(rows).view(*x.shape[:-1], self.out_features)

    def multiply(self, rows: Float8Rows) -> Tensor:
        """Rows that are rounded in this layer's groups to [T, out_features]."""
        codes, scales = rows.padded()
        product = torch._scaled_mm(codes, self.codes.t(), scales, self.scales, bias=self.bias, out_dtype=torch.bfloat16)
        return product[: len(rows.codes)]


def empty_rows(x: Tensor, num_inputs: int, group: int) -> Float8Rows:
    """Room for the rows of ``x``, [T, ...], rounded."""
    num_groups = num_inputs // group
    num_rows = len(x) if num_groups == 1 else -(-len(x) // ROW_TILE) * ROW_TILE
    codes = x.new_empty(num_rows, num_inputs, dtype=torch.float8_e4m3fn)
    stride = num_rows if num_groups > 1 else 1
    scales = x.new_empty_strided((num_rows, num_groups), (1, stride), dtype=torch.float32)
    return Float8Rows(codes[: len(x)], scales[: len(x)])


def round_rows(x: Tensor, group: int, *, is_gated: bool = False) -> Float8Rows:
    """Rows [T, K] rounded in groups, by one launch on a GPU; gated: silu(gate) * up of ``x`` [T, 2 K]."""
    if x.device.type == "cuda" and has_triton():
        return launch_rounding(x, group, is_gated=is_gated)
    if is_gated:
        gate, up = x.chunk(2, dim=1)
        x = nn.functional.silu(gate) * up
    groups = x.float().view(len(x), -1, group)
    scales = groups.abs().amax(2).clamp_min(1e-12) / _LARGEST
    out = empty_rows(x, x.shape[1], group)
    out.codes.copy_((groups / scales[:, :, None]).flatten(1))
    out.scales.copy_(scales)
    return out


def launch_rounding(x: Tensor, group: int, *, is_gated: bool = False) -> Float8Rows:
    """:func:`round_rows` by its kernel."""
    from engine.cuda import float8_kernels  # noqa: PLC0415 - there is no Triton without a GPU

    size = x.shape[1] // (1 + is_gated)
    out = empty_rows(x, size, group)
    padded = padded_sizes(size, group)
    float8_kernels.round_rows[(len(x),)](x.contiguous(), *out, DIM=size, **padded, IS_GATED=is_gated, num_warps=8)
    return out


def padded_sizes(size: int, group: int) -> dict[str, int]:
    """A row's numbers and those of a group for kernels: powers of two; a group that is the row is the padded row."""
    padded = 1 << (size - 1).bit_length()
    return {"PADDED_DIM": padded, "GROUP": padded if group == size else group}
