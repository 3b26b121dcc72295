"""What a GGUF file's metadata says in the terms of ``config.json``, and its tensors under transformers' names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from engine.gguf_file import GgufFile
from specdec.errors import InvalidRequest, ModelNotSupported

#: ``general.architecture``, which is transformers' model type, and the class of each.
ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
#: What llama3's scaling is made of beside its factor, in every published model.
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def config_of(file: GgufFile) -> dict[str, Any]:
    """``config.json`` of a file.

    Raises:
        ModelNotSupported: another architecture, experts, or positions that are scaled in a way that is not known.
        InvalidRequest: metadata is missing.
    """
    metadata = file.metadata
    kind = metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ModelNotSupported(
            f"{file.path} holds a {kind!r} model; of GGUF {', '.join(ARCHITECTURES)} are read: take the checkpoint in"
            " Hugging Face format"
        )
    if metadata.get(f"{kind}.expert_count"):
        raise ModelNotSupported(
            f"{file.path} holds a model of {metadata[f'{kind}.expert_count']} experts, which are not read of GGUF: take"
            " the checkpoint in Hugging Face format"
        )

    def number(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if isinstance(value, (int, float)):
            return value
        raise InvalidRequest(f"{file.path} lacks {kind}.{name} in its metadata; convert the model anew", param="model")

    heads, hidden = number("attention.head_count"), number("embedding_length")
    length = number("context_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise InvalidRequest(f"{file.path} lacks token_embd.weight: it is no language model", param="model")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", hidden // heads),
        "max_position_embeddings": length,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope_of(file, kind, length),
        # An output layer that is the embedding's is read a second time, in its blocks.
        "tie_word_embeddings": False,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends_of(metadata),
        "quantization_config": {"quant_method": "gguf", "file": file.path.name},
    }
    return config


def tensor_names(file: GgufFile) -> dict[str, str]:
    """transformers' name of every tensor -> its name in the file. ``rope_freqs`` is part of the configuration."""
    found: dict[str, str] = {}
    for name in file.tensors:
        if (layer := _LAYER.fullmatch(name)) is not None and layer[2] in _NAMES:
            found[f"model.layers.{layer[1]}.{_NAMES[layer[2]]}.{layer[3]}"] = name
        elif name != "rope_freqs.weight":
            found[_OTHER_NAMES.get(name, name)] = name
    found.setdefault("lm_head.weight", "token_embd.weight")
    return found


def _ends_of(metadata: Mapping[str, Any]) -> list[int]:
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({int(token_id) for token_id in ids if token_id is not None})


def _rope_of(file: GgufFile, kind: str, length: int) -> dict[str, Any]:
    """``rope_parameters``."""
    metadata = file.metadata
    base = float(metadata.get(f"{kind}.rope.freq_base", 10000.0))
    scaling = str(metadata.get(f"{kind}.rope.scaling.type", "none"))
    factor = float(metadata.get(f"{kind}.rope.scaling.factor", 1.0))
    original = metadata.get(f"{kind}.rope.scaling.original_context_length")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_of(file, base)
    if scaling in {"none", ""} or factor == 1.0:
        return {"rope_type": "default", "rope_theta": base}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if scaling == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": int(original or length / factor),
        }
    raise ModelNotSupported(
        f"{file.path} scales its positions by {scaling!r}; none, linear, yarn and llama3 are read: take the checkpoint"
        " in Hugging Face format"
    )


def _llama3_of(file: GgufFile, base: float) -> dict[str, Any]:
    """The parameters of llama3's scaling, from the divisors of the frequencies that the file holds in their place."""
    stored = file.tensors["rope_freqs.weight"]
    divisors = memoryview(file.data)[stored.start : stored.start + stored.num_bytes].cast("f").tolist()
    factor = max(divisors)
    for i, divisor in enumerate(divisors):
        turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * base ** (i / len(divisors)))
        share = (turns - _LLAMA3["low_freq_factor"]) / (_LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"])
        share = min(1.0, max(0.0, share))
        if abs(1 / ((1 - share) / factor + share) - divisor) > 1e-3 * divisor:
            raise ModelNotSupported(
                f"{file.path} divides its frequencies (rope_freqs) in another way than llama3: take the checkpoint in"
                " Hugging Face format"
            )
    if factor == 1.0:
        return {"rope_type": "default", "rope_theta": base}
    return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **_LLAMA3}
