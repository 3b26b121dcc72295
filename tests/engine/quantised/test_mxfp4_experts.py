"""gpt-oss' own format: experts in MXFP4, packed by compressed-tensors; they stay packed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.loading import load
from engine.quantised.packed_integers import read_experts
from specdec.settings import ModelSettings

_GROUP = 32


def test_gpt_oss_with_packed_experts_answers_as_their_numbers(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("gpt_oss", hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    args = QuantizationArgs(num_bits=4, type="float", strategy="group", symmetric=True, group_size=_GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = tensors.pop(name).transpose(1, 2).float()  # [E, N, K]
        rows = weight.reshape(-1, weight.shape[2])
        scale = rows.view(len(rows), -1, _GROUP).abs().amax(2) / 6
        stored = compressor.compress({"weight": rows, "weight_scale": scale}, scheme)
        blocks = (*weight.shape[:2], -1, _GROUP // 2)
        tensors[f"{name}_blocks"] = stored["weight_packed"].reshape(blocks).contiguous()
        tensors[f"{name}_scales"] = stored["weight_scale"].reshape(*weight.shape[:2], -1).contiguous()
        meant = compressor.decompress(stored, scheme)["weight"].view_as(weight)
        assert not torch.equal(meant, weight)
        parameters[name].data = meant.transpose(1, 2).float().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ModelSettings(model=str(tmp_path), device="cpu", dtype="float32", num_threads=1, block_size=4)
    wanted_decoded = convert_moe_packed_tensors(
        tensors["model.layers.0.mlp.experts.down_proj_blocks"],
        tensors["model.layers.0.mlp.experts.down_proj_scales"],
        dtype=torch.float32,
    )
    found = read_experts(*(tensors[f"model.layers.0.mlp.experts.down_proj_{part}"] for part in ("blocks", "scales")))
    assert torch.equal(torch.stack([weight.decode() for weight in found]).transpose(1, 2), wanted_decoded)
    engine = load.load_engine(settings)
    assert engine.runner.name == "native attention"
    assert engine.info.num_parameters == model.num_parameters()
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("_blocks"))
    plain = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales")))
    assert engine.info.weight_bytes[0] <= plain + 1.26 * experts  # of 16 bytes a scale of 4
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    error = (tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std()
    assert float(error) < 1e-5
