"""Tiny targets with prediction layers: configurations of families, and checkpoints named as these publish them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    NemotronHConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

VOCAB, HIDDEN = 97, 32
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _deepseek() -> PretrainedConfig:
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    groups = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = _SIZES | {"num_key_value_heads": 4}
    return DeepseekV3Config(**sizes, **_EXPERTS, **ranks, **groups, num_nextn_predict_layers=1)


def _glm() -> PretrainedConfig:
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return Glm4MoeConfig(**_SIZES, **_EXPERTS, **groups, head_dim=8, use_qk_norm=True, num_nextn_predict_layers=1)


def _nemotron() -> PretrainedConfig:
    sizes = {name: value for name, value in _SIZES.items() if name != "num_hidden_layers"}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 16}
    heads = {"head_dim": 8, "layers_block_type": ["linear_attention", "full_attention", "moe"]}
    states = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
    return NemotronHConfig(**sizes, **_EXPERTS, **groups, **heads, **states, num_nextn_predict_layers=1)


#: A target's configuration by the family of its prediction layers.
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm,
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SIZES, **_EXPERTS, **_DELTA, num_experts=4, shared_expert_intermediate_size=16
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**_SIZES, **_DELTA),
    "mimo": lambda: Qwen2Config(**_SIZES),
    "nemotron_h": _nemotron,
}


def names_of(family: str, layer: int = 0) -> tuple[str, str, dict[str, str]]:
    """What the tensors of the decoder layer begin with, what those around it begin with, and their names."""
    if family.startswith("qwen"):
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        return f"mtp.layers.{layer}.", "mtp.", dict(zip(("enorm", "hnorm", "eh_proj", "norm"), names, strict=True))
    if family == "nemotron_h":
        names = ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.1.final_layernorm")
        return "mtp.layers.", "mtp.", dict(zip(("enorm", "hnorm", "eh_proj", "norm"), names, strict=True))
    if family == "mimo":
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        place = f"model.mtp_layers.{layer}."
        return place, place, dict(zip(("enorm", "hnorm", "eh_proj", "norm"), names, strict=True))
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    place = f"model.layers.{2 + layer}."
    return place, place, dict(zip(("enorm", "hnorm", "eh_proj", "norm"), names, strict=True))


def shaken(model: PreTrainedModel, seed: int, share_of_layers: float = 1.0) -> PreTrainedModel:
    """Weights so large that every part tells; those in layers multiplied by ``share_of_layers``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5, generator=generator)
                parameter.mul_(share_of_layers if ".layers." in name else 1.0)
            elif "A_log" not in name and "dt_bias" not in name:
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def one_layer(config: PretrainedConfig) -> PretrainedConfig:
    """The same with one layer, of the kind that prediction layers are."""
    one = copy.deepcopy(config)
    if config.model_type == "nemotron_h":
        one.layers_block_type = one.mtp_layers_block_type
        return one
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = ["full_attention"]
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    return one


#: A model whose one layer and final norm are a prediction layer's, and the three tensors before that layer.
Layer = tuple[PreTrainedModel, dict[str, torch.Tensor]]


def write_mtp_target(
    folder: Path, family: str, *, agrees: bool = False, vocab: int = VOCAB
) -> tuple[PreTrainedModel, PreTrainedModel, dict[str, torch.Tensor]]:
    """A checkpoint of a target with a prediction layer: the target, and that layer."""
    target, ((body, around),) = write_mtp_layers(folder, family, 1, agrees=agrees, vocab=vocab)
    return target, body, around


def write_mtp_layers(
    folder: Path, family: str, count: int, *, agrees: bool = False, vocab: int = VOCAB
) -> tuple[PreTrainedModel, list[Layer]]:
    """The same with several.

    ``agrees``: layers hardly matter, so a token depends on the one before, and the prediction layers know it.
    """
    config = CONFIGS[family]()
    config.vocab_size = vocab
    setattr(config, "mtp_num_hidden_layers" if family.startswith("qwen") else "num_nextn_predict_layers", count)
    target = shaken(AutoModelForCausalLM.from_config(config), 1, 0.01 if agrees else 1.0)
    layers: list[Layer] = []
    tensors: dict[str, torch.Tensor] = {}
    for i in range(count):
        body, around = _layer(target, family, 2 + 2 * i, agrees)
        if i and family.startswith("qwen"):  # the layers share what is around them
            around = layers[0][1]
            body.get_decoder().norm.weight.data = layers[0][0].get_decoder().norm.weight
        layers.append((body, around))
        tensors |= _named(folder, family, i, target, body, around)
    target.save_pretrained(folder)
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    if family == "mimo":
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"qwen2"', '"mimo"').replace("Qwen2ForCausalLM", "MiMoForCausalLM"))
    return target, layers


def _layer(target: PreTrainedModel, family: str, seed: int, agrees: bool) -> Layer:
    """A random one on the embedding and output layer of a target."""
    body = shaken(AutoModelForCausalLM.from_config(one_layer(target.config)), seed, 0.01 if agrees else 1.0)
    body.get_input_embeddings().weight.data = target.get_input_embeddings().weight
    body.get_output_embeddings().weight.data = target.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(seed + 1)
    around = {
        "enorm": 0.5 + torch.rand(HIDDEN, generator=generator),
        "hnorm": 0.5 + torch.rand(HIDDEN, generator=generator),
        "eh_proj": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2,
    }
    if agrees:
        parts = [torch.eye(HIDDEN), 0.01 * torch.eye(HIDDEN)]
        around["eh_proj"] = torch.cat(parts[::-1] if family == "mimo" else parts, 1)
        around["enorm"] = torch.zeros(HIDDEN) if family.startswith("qwen") else torch.ones(HIDDEN)
        norm = "norm_f" if family == "nemotron_h" else "norm"
        getattr(body.get_decoder(), norm).weight.data = getattr(target.get_decoder(), norm).weight
    return body, around


def _named(  # noqa: PLR0917
    folder: Path,
    family: str,
    layer: int,
    target: PreTrainedModel,
    body: PreTrainedModel,
    around: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors of a prediction layer as its family names them."""
    body.save_pretrained(folder / "body")
    begin, place, names = names_of(family, layer)
    saved = load_file(folder / "body" / "model.safetensors")
    theirs = "backbone.layers." if family == "nemotron_h" else "model.layers.0."
    tensors = {name.replace(theirs, begin): value.clone() for name, value in saved.items() if name.startswith(theirs)}
    norm = "backbone.norm_f.weight" if family == "nemotron_h" else "model.norm.weight"
    tensors[f"{place}{names['norm']}.weight"] = saved[norm].clone()
    tensors |= {f"{place}{names[name]}.weight": value.clone() for name, value in around.items()}
    if place.startswith("model.layers."):  # as published: copies of the target's own
        tensors[f"{place}embed_tokens.weight"] = target.get_input_embeddings().weight.clone()
        tensors[f"{place}shared_head.head.weight"] = target.get_output_embeddings().weight.clone()
    return tensors
