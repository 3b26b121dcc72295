"""Packed integers are what the decoders of compressed-tensors and transformers, and the formulas of AWQ and GPTQ, make
of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from engine.quantised.packed_integers import read_linear
from engine.quantised_formats import QuantisedFormat

_N, _K, _GROUP = 24, 64, 32
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def _draw(low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high, size, generator=torch.Generator().manual_seed(low + high + sum(size)))


@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("strategy", "symmetric"), [("group", True), ("group", False), ("channel", True), ("channel", False)]
)
def test_compressed_tensors(kind: str, bits: int, strategy: str, symmetric: bool) -> None:
    if kind == "int-quantized" and bits == 4:
        bits, strategy = 8, "channel"
    group = _GROUP if strategy == "group" else _K
    args = QuantizationArgs(
        num_bits=bits, strategy=strategy, symmetric=symmetric, group_size=group if strategy == "group" else None
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = (torch.rand(_N, _K // group) + 0.1).bfloat16() / 2**bits
    state: dict[str, Any] = {"weight": torch.randn(_N, _K).bfloat16(), "weight_scale": scale}
    if not symmetric:
        half = 2 ** (bits - 1)
        state["weight_zero_point"] = _draw(-half, half, _N, _K // group).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    marker = "weight" if kind == "int-quantized" else "weight_packed"
    assert marker in stored
    form = QuantisedFormat("compressed-tensors", bits, group, marker=marker)
    weight = read_linear(form, stored)
    assert torch.equal(weight.decode().to(expected.dtype), expected)
    assert weight.bits == bits
    assert (weight.offsets is None) == symmetric


@pytest.mark.parametrize(("kind", "group"), [("nvfp4-pack-quantized", 16), ("mxfp4-pack-quantized", 32)])
def test_4_bit_floats(kind: str, group: int) -> None:
    is_nv = group == 16
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group" if is_nv else "group", symmetric=True, group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = torch.rand(_N, _K // group) + 0.1
    state: dict[str, Any] = {"weight": torch.randn(_N, _K), "weight_scale": scale}
    if is_nv:
        state["weight_global_scale"] = torch.tensor([7.3])
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    assert len(expected.unique()) > 20
    form = QuantisedFormat("compressed-tensors", 4, group, marker="weight_packed", is_float=True)
    assert torch.equal(read_linear(form, stored).decode().to(expected.dtype), expected)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_of_transformers(scale_fmt: str) -> None:
    config = FineGrainedFP8Config(weight_block_size=(16, 32), scale_fmt=scale_fmt)
    quantizer = SimpleNamespace(quantization_config=config)
    stored = Fp8Quantize(quantizer).convert({"weight": torch.randn(64, 96)})
    assert stored["weight_scale_inv"].shape == (4, 3)
    form = QuantisedFormat("fp8", 8, 32, marker="weight", is_float=True, rows=16)
    expected = Fp8Dequantize(quantizer).convert(stored)["weight"]
    assert torch.equal(read_linear(form, stored).decode().to(expected.dtype), expected)


@pytest.mark.parametrize("same_zero", [False, True])
def test_awq(same_zero: bool) -> None:
    codes, zeros = _draw(0, 16, _K, _N), _draw(0, 16, _K // _GROUP, _N)
    if same_zero:
        zeros.fill_(8)
    scales = torch.rand(_K // _GROUP, _N).half()

    def packed(values: torch.Tensor) -> torch.Tensor:
        words = torch.zeros(values.shape[0], _N // 8, dtype=torch.int64)
        for j in range(_N // 8):
            for nibble, column in enumerate(_AWQ_COLUMNS):
                words[:, j] |= values[:, 8 * j + column] << 4 * nibble
        return words.to(torch.int32)

    form = QuantisedFormat("awq", 4, _GROUP)
    weight = read_linear(form, {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales})
    each = torch.arange(_K) // _GROUP
    expected = ((codes - zeros[each]).half() * scales[each]).t()  # as AutoAWQ's dequantize_gemm orders it
    assert torch.equal(weight.decode().half(), expected)
    assert (weight.offsets is None) == same_zero


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, shift: int) -> None:
    in_word = 32 // bits
    codes, zeros = _draw(0, 2**bits, _K, _N), _draw(1, 2**bits, _K // _GROUP, _N)
    scales = torch.rand(_K // _GROUP, _N).half()
    qweight = torch.zeros(_K // in_word, _N, dtype=torch.int64)
    qzeros = torch.zeros(_K // _GROUP, _N // in_word, dtype=torch.int64)
    for i in range(in_word):
        qweight |= codes[i::in_word] << bits * i
        qzeros |= (zeros[:, i::in_word] - shift) << bits * i
    each = torch.arange(_K) // _GROUP
    tensors = {
        "qweight": qweight.to(torch.int32),
        "qzeros": qzeros.to(torch.int32),
        "scales": scales,
        "g_idx": each.to(torch.int32),
    }
    form = QuantisedFormat("gptq", bits, _GROUP, zero_shift=shift)
    weight = read_linear(form, tensors)
    exact = scales[each].double() * (codes - zeros[each])
    assert torch.equal(weight.decode().half(), exact.half().t())
    shuffled = each[torch.randperm(_K, generator=torch.Generator().manual_seed(4))]
    weight = read_linear(form, {**tensors, "g_idx": shuffled.to(torch.int32)})
    exact = scales[shuffled].double() * (codes - zeros[shuffled])
    assert torch.equal(weight.decode().half(), exact.half().t())
    with pytest.raises(ValueError, match="act-order"):
        read_linear(form, {**tensors, "g_idx": torch.zeros(_K, dtype=torch.int32)})
