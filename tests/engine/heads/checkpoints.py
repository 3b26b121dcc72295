"""Tiny random targets and heads, written as they are published: names, shapes, dtypes and fields of the config.

The draft's RoPE base is never the target's, norms are random, and the draft vocabulary is scattered: a reader that
mistakes one for the other shows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.llamas import build_llama

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB, DRAFT_VOCAB, INNER = 32, 4, 2, 64, 97, 41, 24
HEAD_DIM = HIDDEN // HEADS
TARGET_LAYERS = 7
TARGET_ROPE, DRAFT_ROPE = 50000.0, 700.0
EPS = 1e-5
MEDUSA_SIZES = {"hidden_size": HIDDEN, "vocab_size": VOCAB}


@dataclass(frozen=True)
class Published:
    """What was written."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def build_target(**changes: Any) -> LlamaForCausalLM:
    options = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rope_theta": TARGET_ROPE,
        "rms_norm_eps": EPS,
    }
    model = build_llama(**(options | changes))
    _shake_norms(dict(model.named_parameters()))
    return model


def write_target(folder: Path, model: LlamaForCausalLM, *, is_sharded: bool = False) -> Path:
    """A target's checkpoint; sharded into files of a few tensors with an index."""
    model.save_pretrained(folder, max_shard_size=40_000 if is_sharded else "5GB")
    assert (folder / "model.safetensors.index.json").exists() == is_sharded
    return folder


def eagle_config(**changes: Any) -> dict[str, Any]:
    """Of ``yuhuili/EAGLE-…``: a Llama of one layer, and ``bias`` in some."""
    return layer_config() | {"architectures": ["LlamaForCausalLM"], "rope_theta": DRAFT_ROPE} | changes


def eagle_tensors(
    seed: int = 1, *, bias: bool = True, embeddings: bool = True, qkv_bias: bool = False
) -> dict[str, Tensor]:
    """No ``input_layernorm``, no final norm, no output layer."""
    draw = Draw(seed)
    tensors = {"fc.weight": draw(HIDDEN, 2 * HIDDEN), **layer_tensors(draw, "layers.0.", HIDDEN, qkv_bias)}
    if bias:
        tensors["fc.bias"] = draw(HIDDEN)
    if embeddings:
        tensors["embed_tokens.weight"] = draw(VOCAB, HIDDEN)
    return tensors


def eagle3_config(**changes: Any) -> dict[str, Any]:
    """Of ``yuhuili/EAGLE3-…``: without ``rope_theta``, which then is 10000."""
    return layer_config() | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB} | changes


def eagle3_speculators_config(**changes: Any) -> dict[str, Any]:
    """Of the speculators library."""
    layer = {**layer_config(), "rope_parameters": {"rope_theta": DRAFT_ROPE, "rope_type": "default"}}
    return {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
        "transformer_layer_config": layer,
        "torch_dtype": "float32",
    } | changes


def eagle3_tensors(
    seed: int = 2,
    *,
    layer: str = "midlayer.",
    prefix: str = "",
    maps: tuple[str, ...] = ("d2t", "t2d"),
    embeddings: bool = False,
    input_norm: bool = False,
    fc_norm: bool = False,
    draft_vocab: int = DRAFT_VOCAB,
    target_hidden: int = HIDDEN,
    num_layers: int = 1,
    qk_norm: bool = False,
    fc: bool = True,
) -> dict[str, Tensor]:
    """``keep`` sorted ids are the draft vocabulary; ``d2t`` is their distance from 0, 1, 2, …"""
    draw = Draw(seed)
    tensors = {
        "fc.weight": draw(HIDDEN, 3 * target_hidden),
        **layer_tensors(draw, layer, 2 * HIDDEN, qkv_bias=False),
        f"{layer}input_layernorm.weight": draw.norm(HIDDEN),
        f"{layer}hidden_norm.weight": draw.norm(HIDDEN),
        "norm.weight": draw.norm(HIDDEN),
        "lm_head.weight": draw(draft_vocab, HIDDEN),
    }
    keep = torch.randperm(VOCAB, generator=draw.generator)[:draft_vocab].sort().values
    if "d2t" in maps:
        tensors["d2t"] = keep - torch.arange(draft_vocab)
    if "t2d" in maps:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, keep, True)
    if embeddings:
        tensors["embed_tokens.weight"] = draw(VOCAB, HIDDEN)
    for i in range(1, num_layers):
        tensors |= layer_tensors(draw, f"layers.{i}.", HIDDEN, qkv_bias=False)
        tensors[f"layers.{i}.input_layernorm.weight"] = draw.norm(HIDDEN)
    if qk_norm:
        prefixes = [layer, *(f"layers.{i}." for i in range(1, num_layers))]
        tensors |= {f"{name}self_attn.{part}_norm.weight": draw.norm(HEAD_DIM) for name in prefixes for part in "qk"}
    if not fc:
        del tensors["fc.weight"]
    if input_norm:
        tensors["input_norm.weight"] = draw.norm(3 * target_hidden)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": draw.norm(target_hidden) for i in range(3)}
    outside = ("lm_head.", "d2t", "t2d")
    return {name if name.startswith(outside) else prefix + name: value for name, value in tensors.items()}


def medusa_config(**changes: Any) -> dict[str, Any]:
    """Of ``FasterDecoding/medusa-…``: its number of heads is wrong."""
    return {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": "target",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    } | changes


def medusa_tensors(seed: int = 3, *, num_heads: int = 4, num_layers: int = 1, prefix: str = "") -> dict[str, Tensor]:
    """``{head}.{block}.linear.*``, then the head's output layer."""
    draw = Draw(seed)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = draw(HIDDEN, HIDDEN)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = draw(HIDDEN)
        tensors[f"{prefix}{head}.{num_layers}.weight"] = draw(VOCAB, HIDDEN)
    return tensors


def as_vllm_names_them(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Medusa's ``blocks.{head}.layers.{block}.*`` and ``lm_heads.{head}.weight``."""
    renamed = {}
    for name, value in tensors.items():
        head, layer, rest = name.split(".", 2)
        is_output = layer == str(num_layers)
        renamed[f"lm_heads.{head}.weight" if is_output else f"blocks.{head}.layers.{layer}.{rest[7:]}"] = value
    return renamed


def mlp_config(**changes: Any) -> dict[str, Any]:
    """Of ``ibm-ai-platform/…-accelerator``."""
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": HIDDEN,
        "inner_dim": INNER,
        "model_type": "mlp_speculator",
        "n_candidates": 5,
        "n_predict": 4,
        "scale_input": False,
        "tie_weights": False,
        "top_k_tokens_per_head": [5, 4, 3, 2],
        "torch_dtype": "float32",
        "transformers_version": "4.38.2",
        "vocab_size": VOCAB,
    } | changes


def mlp_tensors(
    seed: int = 4, *, n_predict: int = 4, inner: int = INNER, tied: bool = False, once: bool = False
) -> dict[str, Tensor]:
    """Steps of their own, or tied ones: written for each step, or, with ``once``, a single time."""
    draw = Draw(seed)
    tensors: dict[str, Tensor] = {}
    for step in range(n_predict):
        own = {
            f"emb.{step}.weight": draw(VOCAB, inner),
            f"proj.{step}.weight": draw(inner, inner if step else HIDDEN),
            f"head.{step}.weight": draw(VOCAB, inner),
            f"ln.{step}.weight": draw.norm(inner),
            f"ln.{step}.bias": draw(inner),
        }
        for name, value in own.items():
            first = name.replace(f".{step}.", ".1." if name.startswith("proj") else ".0.")
            is_repeated = tied and step > name.startswith("proj")
            if not (is_repeated and once):
                tensors["speculator." + name] = tensors["speculator." + first].clone() if is_repeated else value
    return tensors


def write_head_files(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> Published:
    """``config.json`` and one file of weights: ``*.safetensors``, ``*.bin`` or ``*.pt``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return Published(folder, config, tensors)


def layer_config() -> dict[str, Any]:
    return {
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 1,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def layer_tensors(draw: Draw, name: str, input_size: int, qkv_bias: bool) -> dict[str, Tensor]:
    kv_size = KV_HEADS * HEAD_DIM
    tensors = {
        f"{name}self_attn.q_proj.weight": draw(HIDDEN, input_size),
        f"{name}self_attn.k_proj.weight": draw(kv_size, input_size),
        f"{name}self_attn.v_proj.weight": draw(kv_size, input_size),
        f"{name}self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        f"{name}mlp.gate_proj.weight": draw(INTERMEDIATE, HIDDEN),
        f"{name}mlp.up_proj.weight": draw(INTERMEDIATE, HIDDEN),
        f"{name}mlp.down_proj.weight": draw(HIDDEN, INTERMEDIATE),
        f"{name}post_attention_layernorm.weight": draw.norm(HIDDEN),
    }
    if qkv_bias:
        tensors |= {
            f"{name}self_attn.{part}_proj.bias": draw(size)
            for part, size in zip("qkv", (HIDDEN, kv_size, kv_size), strict=True)
        }
    return tensors


class Draw:
    """Random tensors of about the size that keeps activations near 1."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator) * (0.9 * shape[-1] ** -0.5)

    def norm(self, size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=self.generator)


def _shake_norms(parameters: dict[str, torch.nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand_like(parameter))
