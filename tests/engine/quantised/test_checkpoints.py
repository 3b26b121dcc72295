"""Checkpoints of packed integers through the whole engine, made with compressed-tensors or by the formulas of GPTQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import nn
from transformers import PreTrainedModel

from engine.loading import load
from engine.quantised_formats import MODEL_TYPES
from engine.refused_checkpoints import check_config
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
Stored = dict[str, torch.Tensor]
#: From a weight to a layer's tensors and the weight they stand for.
Store = Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]


def _write(model: PreTrainedModel, folder: Path, quantization: dict[str, Any], store: Store) -> ModelSettings:
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


def _compressed(bits: int, symmetric: bool, kind: str = "pack-quantized") -> tuple[dict[str, Any], Store]:
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


def _four_bit_floats(kind: str, group: int) -> tuple[dict[str, Any], Store]:
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


def _gptq(*, act_order: bool = False, own_orders: bool = False) -> tuple[dict[str, Any], Store]:
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


def _awq() -> tuple[dict[str, Any], Store]:
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


def _fp8(block: int) -> tuple[dict[str, Any], Store]:
    """The formula of DeepSeek's checkpoints; blocks at the edges may be smaller."""

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        scale = F.max_pool2d(weight.abs()[None], block, ceil_mode=True)[0] / 448
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread

    return {"quant_method": "fp8", "weight_block_size": [block, block]}, store


def _compressed_fp8(kind: str = "float-quantized", strategy: str = "channel") -> tuple[dict[str, Any], Store]:
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
_REAL_FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Store]]] = {
    "fp8": lambda: _fp8(48),
    "fp8 w8a8": _compressed_fp8,
    "fp8 w8a16": lambda: _compressed_fp8("naive-quantized", "tensor"),
}
_FORMATS: dict[str, Callable[[], tuple[dict[str, Any], Store]]] = {
    "w4a16": lambda: _compressed(4, True),
    "w4a16 asymmetric": lambda: _compressed(4, False),
    "w8a16": lambda: _compressed(8, True),
    "w8a8": lambda: _compressed(8, True, "int-quantized"),
    "nvfp4": lambda: _four_bit_floats("nvfp4-pack-quantized", 16),
    "mxfp4": lambda: _four_bit_floats("mxfp4-pack-quantized", 32),
    "awq": _awq,
    "gptq": _gptq,
    "gptq act-order": lambda: _gptq(act_order=True),
}


def _error(engine: Any, model: PreTrainedModel, tools: SimpleNamespace) -> float:
    """Of the logits of 20 tokens, over their spread."""
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    return float((tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std())


@pytest.mark.parametrize("form", [*_REAL_FORMATS, *_FORMATS])
def test_with_real_activations_it_answers_as_the_model_of_those_weights(
    form: str, tmp_path: Path, tools: SimpleNamespace
) -> None:
    is_real = form in _REAL_FORMATS
    model = tools.build("llama", **_SIZES, attention_bias=True)
    settings = _write(model, tmp_path, *({**_REAL_FORMATS, **_FORMATS}[form]()))
    engine = load.load_engine(replace(settings, quantized_activations="int8" if is_real else "float"))
    assert engine.runner.name == "native decoder"
    assert engine.info.num_parameters == model.num_parameters()
    # compressed-tensors rounds the weights that it decodes to bfloat16, but not those of its mxfp4 and channels of fp8
    assert _error(engine, model, tools) < (0.03 if form in {"w8a8", "w8a16", "nvfp4"} or "w4a16" in form else 1e-5)


@pytest.mark.parametrize("name", MODEL_TYPES)
@pytest.mark.parametrize("form", _FORMATS)
def test_a_checkpoint_answers_as_the_weights_it_stands_for(
    form: str, name: str, tmp_path: Path, tools: SimpleNamespace
) -> None:
    options = {
        **_SIZES,
        "tie_word_embeddings": name == "qwen3",
        **({"attention_bias": True} if name == "llama" else {}),
    }
    model = tools.build(name, **options)
    engine = load.load_engine(_write(model, tmp_path, *_FORMATS[form]()))
    assert engine.runner.name == "native decoder"
    assert engine.info.num_parameters == model.num_parameters()
    assert (
        _error(engine, model, tools) < 0.15
    )  # activations of 8 bits, in a model of sharp attention; with wrong scales it is 1


def test_projections_that_take_inputs_in_several_orders_run_apart(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **_SIZES)
    engine = load.load_engine(_write(model, tmp_path, *_gptq(act_order=True, own_orders=True)))
    assert engine.runner.name == "native attention"
    assert _error(engine, model, tools) < 0.15


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path, tools: SimpleNamespace) -> None:
    settings = _write(tools.build("llama", **_SIZES), tmp_path, *_gptq())
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scales"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"model\.layers\.1\.mlp\.up_proj cannot be read as gptq: 'scales'"):
        load.load_engine(settings)
    with pytest.raises(InvalidRequest, match="is quantised already"):
        load.load_engine(ModelSettings(model=str(tmp_path), device="cpu", quantization="int4"))


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq' with version 'gemv'; only 'gemm' is read"),
        ({"quant_method": "awq", "bits": 8}, "bits 8; only 4 is read"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3; 4 and 8 are read"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 24}, "groups of 24; multiples of 16 are read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:down": {}}}, r"other settings for some layers \(dynamic\)"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24"}}},
            "format 'marlin-24'; pack-quantized, int-quantized, float-quantized, nvfp4-pack-quantized, mxfp4-pack",
        ),
    ],
)
def test_what_is_not_read_is_refused_from_the_config(quantization: dict[str, Any], text: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match=f"{text}.*take the checkpoint that is not quantised"):
        check_config(tmp_path)


def test_heads_and_other_architectures_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "gemma2", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="'awq' in a 'gemma2' model; they are read of llama, mistral"):
        check_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    check_config(tmp_path)
    with pytest.raises(ModelNotSupported, match="a head quantised by 'awq'"):
        check_config(tmp_path, is_head=True)
