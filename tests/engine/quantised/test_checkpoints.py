"""Checkpoints of packed integers through the whole engine, made with compressed-tensors or by the formulas of GPTQ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
from transformers import PreTrainedModel

from engine.loading import load
from engine.quantised_formats import MODEL_TYPES
from engine.refused_checkpoints import check_config
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.settings import ModelSettings
from tests.engine.quantised.formats import FORMATS, REAL_FORMATS, gptq, write

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def _error(engine: Any, model: PreTrainedModel, tools: SimpleNamespace) -> float:
    """Of the logits of 20 tokens, over their spread."""
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    return float((tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std())


@pytest.mark.parametrize("form", [*REAL_FORMATS, *FORMATS])
def test_with_real_activations_it_answers_as_the_model_of_those_weights(
    form: str, tmp_path: Path, tools: SimpleNamespace
) -> None:
    is_real = form in REAL_FORMATS
    model = tools.build("llama", **_SIZES, attention_bias=True)
    settings = write(model, tmp_path, *({**REAL_FORMATS, **FORMATS}[form]()))
    engine = load.load_engine(replace(settings, quantized_activations="int8" if is_real else "float"))
    assert engine.runner.name == "native decoder"
    assert engine.info.num_parameters == model.num_parameters()
    # compressed-tensors rounds the weights that it decodes to bfloat16, but not those of its mxfp4 and channels of fp8
    assert _error(engine, model, tools) < (0.03 if form in {"w8a8", "w8a16", "nvfp4"} or "w4a16" in form else 1e-5)


@pytest.mark.parametrize("name", MODEL_TYPES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_answers_as_the_weights_it_stands_for(
    form: str, name: str, tmp_path: Path, tools: SimpleNamespace
) -> None:
    options = {
        **_SIZES,
        "tie_word_embeddings": name == "qwen3",
        **({"attention_bias": True} if name == "llama" else {}),
    }
    model = tools.build(name, **options)
    engine = load.load_engine(write(model, tmp_path, *FORMATS[form]()))
    assert engine.runner.name == "native decoder"
    assert engine.info.num_parameters == model.num_parameters()
    assert (
        _error(engine, model, tools) < 0.15
    )  # activations of 8 bits, in a model of sharp attention; with wrong scales it is 1


def test_projections_that_take_inputs_in_several_orders_run_apart(tmp_path: Path, tools: SimpleNamespace) -> None:
    model = tools.build("llama", **_SIZES)
    engine = load.load_engine(write(model, tmp_path, *gptq(act_order=True, own_orders=True)))
    assert engine.runner.name == "native attention"
    assert _error(engine, model, tools) < 0.15


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path, tools: SimpleNamespace) -> None:
    settings = write(tools.build("llama", **_SIZES), tmp_path, *gptq())
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


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "gemma2", "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="'awq' in a 'gemma2' model; they are read of llama, mistral"):
        check_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    check_config(tmp_path)
