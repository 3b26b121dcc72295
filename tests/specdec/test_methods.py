"""Which method a checkpoint is made for, from files as they are published."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.methods import METHODS, check_prediction_layers, method_of, method_of_config

#: A Llama of one layer: EAGLE's own files say no more than that.
ONE_LAYER = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["EagleModel"], "model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 32000}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama"}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, "eagle"),
        ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "vicuna"}, "medusa"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "medusa"),
        (ONE_LAYER, None),
        ({"architectures": None}, None),
    ],
)
def test_the_config_tells(config, method):
    assert method_of_config(config) == method
    assert method is None or method in METHODS


def write(folder: Path, config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("tensors", "method"),
    [
        (("fc.weight", "layers.0.mlp.up_proj.weight"), "eagle"),
        (("fc.weight", "midlayer.hidden_norm.weight"), "eagle3"),
        (("model.layers.0.mlp.up_proj.weight", "lm_head.weight"), "draft_model"),
    ],
)
def test_a_llama_of_one_layer_is_told_by_its_tensors(tmp_path, suffix, tensors, method):
    values = {name: torch.zeros(2, 2) for name in tensors}
    if suffix == "bin":
        torch.save(values, tmp_path / "pytorch_model.bin")
    else:
        save_file(values, tmp_path / "model.safetensors")
    assert method_of(write(tmp_path, ONE_LAYER)) == method


def test_anything_else_is_a_draft_model(tmp_path):
    assert method_of(str(tmp_path)) == "draft_model"  # which then cannot be loaded, and says why
    assert method_of(write(tmp_path, {**ONE_LAYER, "num_hidden_layers": 2})) == "draft_model"


def test_unknown_kinds_are_refused(tmp_path):
    with pytest.raises(ModelNotSupported, match="speculators_model_type is 'jetspec'"):
        method_of(write(tmp_path, {"speculators_model_type": "jetspec"}))
    with pytest.raises(ModelNotSupported, match=r"DeepSeekMTPModel.* tandem export-mtp"):
        method_of(write(tmp_path, {"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}))


def test_a_folder_without_prediction_layers_is_refused_for_mtp(tmp_path):
    write(tmp_path, {})
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"has no prediction layers.* \"eagle3\""):
        check_prediction_layers(str(tmp_path))
    save_file({"model.layers.9.eh_proj.weight": torch.ones(2)}, tmp_path / "model-2.safetensors")
    check_prediction_layers(str(tmp_path))
