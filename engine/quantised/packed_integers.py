"""Linear layers in compressed-tensors' formats, AWQ and GPTQ: words that hold several codes each.

Every one of whole numbers means ``w = scale · (code - zero)`` with a scale and a zero point for each group of inputs.
Layouts, for N outputs and K inputs, with code i of a word in its bits from ``bits · i`` on:

* compressed-tensors ``pack-quantized``: ``weight_packed`` [N, K · bits / 32], codes stored 2^(bits - 1) higher;
  ``weight_scale`` [N, groups]; ``weight_zero_point`` packed along N in the same way. ``int-quantized``: ``weight``
  int8.
* ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``: ``weight_packed`` uint8 [N, K / 2], e2m1 numbers, the first of two
  in the low half; ``weight_scale`` [N, groups], e4m3 over ``weight_global_scale``, or 127 more than a power of 2.
* AWQ (``gemm``): ``qweight`` [K, N / 8] with columns 0, 2, 4, 6, 1, 3, 5, 7 of eight; ``qzeros`` [groups, N / 8]
  alike; ``scales`` [groups, N].
* GPTQ: ``qweight`` [K · bits / 32, N]; ``qzeros`` [groups, N · bits / 32], one lower unless its format is ``gptq_v2``;
  ``scales`` [groups, N]; ``g_idx`` [K], the group of each input, which is any with act-order.
* gpt-oss' experts: ``…_blocks`` uint8 [E, N, K / 32, 16], e2m1 numbers as above; ``…_scales`` [E, N, K / 32], 127 more
  than a power of 2.
* FP8: ``weight`` e4m3; ``weight_scale_inv`` or ``weight_scale``, a factor for each block, output or all.
* bitsandbytes, 8 bits: ``weight`` int8, ``SCB`` [N], 127 steps. 4 bits: ``weight`` uint8 [N · K / 2, 1], the first
  of two in the high half; ``weight.quant_map`` [16], the numbers; ``weight.absmax``, a factor for each block of
  neighbours, or codes for ``weight.nested_quant_map`` times ``weight.nested_absmax`` plus an offset;
  ``weight.quant_state.…``, JSON.

Sources: compressed-tensors 0.20, AutoAWQ's and GPTQModel's packing, transformers 5.23, bitsandbytes 0.49.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from engine.grouped_weight import GroupedWeight, unpack_nibbles
from engine.quantised_formats import QuantisedFormat

#: Which column of eight each code of an AWQ word belongs to.
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
#: Twice the number that each e2m1 code stands for.
_E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

#: Of weights that are not quantised.
REAL_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
#: Tensors beside a layer's weight that its :class:`GroupedWeight` holds.
OF_LINEARS: Final = frozenset(
    """
    weight weight_packed weight_scale weight_shape weight_zero_point weight_g_idx weight_global_scale input_global_scale
    qweight qzeros scales g_idx weight_scale_inv input_scale SCB weight_format weight.absmax weight.quant_map
    weight.nested_absmax weight.nested_quant_map weight.quant_state.bitsandbytes__nf4
    weight.quant_state.bitsandbytes__fp4
    """.split()  # noqa: SIM905
)

Tensors = Mapping[str, torch.Tensor]


def parts_of(names: Iterable[str]) -> dict[str, list[str]]:
    """By the names of modules, the last parts of their tensors' names."""
    parts: dict[str, list[str]] = {}
    for name in names:
        prefix, _, last = name.rpartition(".")
        if ".weight." in name:  # what bitsandbytes keeps of a weight
            prefix, _, last = name.partition(".weight.")
            last = f"weight.{last}"
        parts.setdefault(prefix, []).append(last)
    return parts


def read_linear(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    """The weight of a linear layer, given the layer's tensors by the last part of their names.

    Raises:
        KeyError: a tensor is missing.
        ValueError: tensors do not fit together.
    """
    if stored.method == "awq":
        return _awq(stored, tensors)
    if stored.method == "bitsandbytes":
        return _llm_int8(tensors) if stored.bits == 8 else _bitsandbytes_4(tensors)
    if stored.is_float and stored.marker == "weight":
        return _float8(stored, tensors)
    return _gptq(stored, tensors) if stored.method == "gptq" else _compressed(stored, tensors)


def read_experts(blocks: torch.Tensor, scales: torch.Tensor) -> list[GroupedWeight]:
    """The weights of all experts in gpt-oss' own form, whose codes stay where they are: in the file, until they are
    packed.
    """
    group = 2 * blocks.shape[-1]
    table = torch.tensor(_E2M1, dtype=torch.int8)
    shape = blocks.shape[1], group * blocks.shape[2]
    factors = torch.exp2(scales.float() - 128)
    return [
        GroupedWeight(*shape, group, own.flatten(1), factor, table=table, rounds=False)
        for own, factor in zip(blocks, factors, strict=True)
    ]


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes, uint8 [R, C · 32 / bits], of int32 words [R, C]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: torch.Tensor = (words[:, :, None] >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(1)


def _e2m1(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    scales = tensors["weight_scale"]
    if scales.dtype == torch.uint8:  # a power of 2
        scales = torch.exp2(scales.float() - 127)
    else:
        scales = scales.float() / tensors["weight_global_scale"].float()
    assert stored.group is not None
    codes = unpack_nibbles(tensors["weight_packed"])
    return GroupedWeight.of_codes(codes, scales / 2, stored.group, table=torch.tensor(_E2M1))


def _float8(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    codes = tensors["weight"]
    if codes.dtype != torch.float8_e4m3fn or bool(codes.float().isnan().any()):
        raise ValueError(f"{codes.dtype} weights, or no numbers among them; e4m3 is read")
    scales = (tensors["weight_scale"] if "weight_scale" in tensors else tensors["weight_scale_inv"]).float()
    if stored.group is None:
        scales = scales.reshape(-1, 1).expand(len(codes), 1)
    else:
        scales = scales.repeat_interleave(stored.rows, 0)[: len(codes)]
    return GroupedWeight.of_codes(codes, scales, stored.group or codes.shape[1])


def _llm_int8(tensors: Tensors) -> GroupedWeight:
    codes = tensors["weight"]
    return GroupedWeight.of_codes(codes, tensors["SCB"].float()[:, None] / 127, codes.shape[1])


def _bitsandbytes_4(tensors: Tensors) -> GroupedWeight:
    name = next((name for name in tensors if name.startswith("weight.quant_state.")), "weight.quant_state")
    state = json.loads(bytes(tensors[name].tolist()))
    num_outputs, num_inputs = state["shape"]
    group = state["blocksize"]
    if num_inputs % group:
        raise ValueError(f"{num_inputs} inputs in blocks of {group}")
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        nested = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: scales.numel()]
        scales = tensors["weight.nested_quant_map"][scales.int()] * nested + state["nested_offset"]
    packed = tensors["weight"].reshape(num_outputs, num_inputs // 2)
    codes = torch.stack([packed >> 4, packed & 15], 2).flatten(1)
    table = tensors["weight.quant_map"].float()
    return GroupedWeight.of_codes(codes, scales.float().view(num_outputs, -1), group, table=table)


def _compressed(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    if stored.is_float:
        return _e2m1(stored, tensors)
    scales = tensors["weight_scale"].float()
    half = 2 ** (stored.bits - 1)
    if stored.marker == "weight":
        codes = (tensors["weight"].int() + half).to(torch.uint8)
    else:
        num_inputs = int(tensors["weight_shape"][1])
        codes = unpack_words(tensors["weight_packed"], stored.bits)[:, :num_inputs]
    scales = scales.reshape(-1, scales.shape[-1] if scales.dim() else 1).expand(codes.shape[0], -1)
    zeros = torch.tensor(half)
    if (zero_point := tensors.get("weight_zero_point")) is not None:
        if zero_point.dtype == torch.int32 and stored.marker != "weight":
            zeros = unpack_words(zero_point.t().contiguous(), stored.bits)[:, : codes.shape[0]].t().int()
        else:
            zeros = zero_point.int().reshape(zero_point.shape[0] if zero_point.dim() else 1, -1) + half
    order = tensors.get("weight_g_idx")
    return _grouped(stored, codes, scales, zeros, order)


def _awq(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    columns = torch.tensor(_AWQ_ORDER).argsort()

    def in_order(words: torch.Tensor) -> torch.Tensor:
        return unpack_words(words, 4).view(len(words), -1, 8)[:, :, columns].flatten(1)

    codes, zeros = in_order(tensors["qweight"]).t(), in_order(tensors["qzeros"]).t().int()
    return _grouped(stored, codes, tensors["scales"].float().t(), zeros, None)


def _gptq(stored: QuantisedFormat, tensors: Tensors) -> GroupedWeight:
    codes = unpack_words(tensors["qweight"].t().contiguous(), stored.bits)
    zeros = unpack_words(tensors["qzeros"], stored.bits).t().int() + stored.zero_shift
    return _grouped(stored, codes, tensors["scales"].float().t(), zeros[: codes.shape[0]], tensors.get("g_idx"))


def _grouped(
    stored: QuantisedFormat,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor | None,
) -> GroupedWeight:
    """``scales · (codes - zeros)``: codes uint8 [N, K], scales and zeros [N, groups], or one zero for all."""
    num_inputs = codes.shape[1]
    group = stored.group or num_inputs
    if num_inputs % group:
        raise ValueError(f"{num_inputs} inputs in groups of {group}")
    order = None
    if groups is not None and not torch.equal(groups.long(), torch.arange(num_inputs) // group):
        order = groups.long().argsort(stable=True)
        if not torch.equal(groups.long()[order], torch.arange(num_inputs) // group):
            raise ValueError("groups of several sizes (act-order)")
        codes = codes[:, order]
    first = int(zeros.flatten()[0])
    is_even = bool((zeros == first).all())
    if stored.bits == 4:
        table = torch.arange(16) - (first if is_even else 0)
        offsets = None if is_even else scales * zeros
        return GroupedWeight.of_codes(codes, scales, group, offsets=offsets, table=table, order=order)
    zeros = zeros - 128
    offsets = None if is_even and first == 128 else (scales * zeros).expand(scales.shape)
    return GroupedWeight.of_codes((codes.int() - 128).to(torch.int8), scales, group, offsets=offsets, order=order)
