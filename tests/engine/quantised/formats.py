"""Weights as quantised checkpoints store them, made with compressed-tensors or by the formulas of their libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import nn
from transformers import PreTrainedModel

from specdec.settings import ModelSettings

Stored = dict[str, torch.Tensor]
#: From a weight to a layer's tensors and the weight they stand for.
Store = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]
#: Ends of the names of a head's weights that are no linear layer.
_OTHERS = ("embed_tokens.weight", "markov", "emb.")


def write(model: PreTrainedModel, folder: Path, quantization: dict[str, Any], store: Store) -> ModelSettings:
    """A checkpoint whose projections are stored in another way; the model gets the weights that they stand for."""
    model.save_pretrained(folder)
    tensors: Stored = safetensors.torch.load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored, meant = store(tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            module.weight.data = meant.float()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSettings(model=str(folder), device="cpu", num_threads=1, block_size=4)


def rewritten(tensors: Stored, store: Store, begin: str = "") -> tuple[Stored, Stored, int]:
    """Tensors with the layers of fitting sizes stored in another way, as numbers, and how many those layers are."""
    stored, meant, count = dict(tensors), dict(tensors), 0
    for name, weight in tensors.items():
        fits = weight.dim() == 2 and weight.shape[0] % 16 == 0 and weight.shape[1] % 32 == 0
        if not fits or not name.startswith(begin) or not name.endswith(".weight") or name.endswith(_OTHERS):
            continue
        parts, numbers = store(stored.pop(name).float())
        prefix = name.removesuffix("weight")
        stored |= {prefix + part: tensor.contiguous() for part, tensor in parts.items()}
        meant[name] = numbers.bfloat16()
        count += 1
    return stored, meant, count


def compressed(bits: int, symmetric: bool, kind: str = "pack-quantized") -> tuple[dict[str, Any], Store]:
    strategy = "group" if kind == "pack-quantized" else "channel"
    args = QuantizationArgs(
        num_bits=bits, strategy=strategy, symmetric=symmetric, group_size=32 if strategy == "group" else None
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    inputs = {"num_bits": 8, "type": "int", "dynamic": True} if kind == "int-quantized" else None

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        groups = weight.view(weight.shape[0], -1, 32 if strategy == "group" else weight.shape[1])
        scale = ((groups.amax(2) - groups.amin(2)) / (2**bits - 1)).bfloat16()
        zero = (-(2 ** (bits - 1)) - groups.amin(2) / scale.float()).round().clamp(-128, 127).to(torch.int8)
        if symmetric:
            scale = (groups.abs().amax(2) / (2 ** (bits - 1) - 1)).bfloat16()
        elif bits == 4:
            zero = zero.clamp(-8, 7)
        state = {
            "weight": weight.bfloat16(),
            "weight_scale": scale,
            **({} if symmetric else {"weight_zero_point": zero}),
        }
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    weights = json.loads(args.model_dump_json())
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}, store


def four_bit_floats(kind: str, group: int) -> tuple[dict[str, Any], Store]:
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group" if group == 16 else "group", symmetric=True, group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scale = weight.view(weight.shape[0], -1, group).abs().amax(2) / 6
        state = {"weight": weight, "weight_scale": scale}
        if group == 16:
            state |= {"weight_global_scale": 448 / scale.amax()[None], "input_global_scale": torch.ones(1)}
            state["weight_scale"] = scale * state["weight_global_scale"]
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    inputs = {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": group}
    scheme_of_all = {"format": kind, "weights": json.loads(args.model_dump_json()), "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme_of_all}}, store


def gptq(*, act_order: bool = False, own_orders: bool = False) -> tuple[dict[str, Any], Store]:
    """``act_order``: groups of inputs that are not neighbours, the same for every layer of a width or its own."""
    seeds = iter(range(1000, 2000))

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        index = torch.arange(weight.shape[1], dtype=torch.int32) // 32
        if act_order:
            index = index[
                torch.randperm(len(index), generator=torch.Generator().manual_seed(next(seeds) if own_orders else 5))
            ]
        order = index.argsort(stable=True)
        groups = weight[:, order].view(weight.shape[0], -1, 32)
        scale = (groups.abs().amax(2) / 7).half()
        codes = ((groups / scale.float()[:, :, None]).round().clamp(-8, 7) + 8).int().flatten(1)
        codes = codes[:, order.argsort()]
        shifts = torch.arange(0, 32, 4)
        words = (codes.t().reshape(-1, 8, weight.shape[0]).long() << shifts[:, None]).sum(1)
        zeros = torch.full((groups.shape[1], weight.shape[0] // 8), 0x77777777, dtype=torch.int32)
        stored = {"qweight": words.to(torch.int32), "qzeros": zeros, "scales": scale.t(), "g_idx": index}
        return stored, (codes - 8) * scale.float()[:, index.long()]

    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order}, store


def awq() -> tuple[dict[str, Any], Store]:
    """AutoAWQ's "gemm": words of eight outputs in its order, zero points beside them."""
    shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])

    def words(codes: torch.Tensor) -> torch.Tensor:
        return (codes.t().reshape(codes.shape[1], -1, 8).long() << shifts).sum(2).to(torch.int32)

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        groups = weight.view(weight.shape[0], -1, 32)
        low = groups.amin(2)
        scale = ((groups.amax(2) - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = ((groups / scale.float()[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
        meant = (codes - zero[:, :, None]) * scale.float()[:, :, None]
        return {"qweight": words(codes.flatten(1)), "qzeros": words(zero), "scales": scale.t()}, meant.flatten(1)

    return {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, store


def fp8(block: int) -> tuple[dict[str, Any], Store]:
    """The formula of DeepSeek's checkpoints; blocks at the edges may be smaller."""

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scale = F.max_pool2d(weight.abs()[None], block, ceil_mode=True)[0] / 448
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread

    return {"quant_method": "fp8", "weight_block_size": [block, block]}, store


def compressed_fp8(kind: str = "float-quantized", strategy: str = "channel") -> tuple[dict[str, Any], Store]:
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scale = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax()[None]) / 448
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    group = {"format": kind, "weights": json.loads(args.model_dump_json()), "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, store


#: Whose activations stay as they are.
REAL_FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Store]]] = {
    "fp8": lambda: fp8(48),
    "fp8 w8a8": compressed_fp8,
    "fp8 w8a16": lambda: compressed_fp8("naive-quantized", "tensor"),
}
FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Store]]] = {
    "w4a16": lambda: compressed(4, True),
    "w4a16 asymmetric": lambda: compressed(4, False),
    "w8a16": lambda: compressed(8, True),
    "w8a8": lambda: compressed(8, True, "int-quantized"),
    "nvfp4": lambda: four_bit_floats("nvfp4-pack-quantized", 16),
    "mxfp4": lambda: four_bit_floats("mxfp4-pack-quantized", 32),
    "awq": awq,
    "gptq": gptq,
    "gptq act-order": lambda: gptq(act_order=True),
}
