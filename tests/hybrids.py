"""Small models with recurrent states, of random weights, and drafts that agree with them now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tandem.checkpoints import MODELS

#: Of each kind of state: the model type and what its configuration needs.
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "short convolution": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "gated delta net": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
    "mamba2": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
        },
    ),
}


def build_hybrid(kind: str, *, noise: float = 0.0) -> PreTrainedModel:
    """A model over the bundled tokenizer; with ``noise`` its weights are moved by so much, as a draft's may be."""
    model_type, special = KINDS[kind]
    options = {
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    generator = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options, **special))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = 1.0 if "norm" in name and weight.dim() == 1 and "bias" not in name else 0.0
            weight.copy_(mean + 0.3 * torch.randn(weight.shape, generator=generator))
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return model.eval()


def save_hybrid(folder: Path, kind: str, *, noise: float = 0.0) -> str:
    """A checkpoint of :func:`build_hybrid` with the bundled tokenizer; returns its folder."""
    build_hybrid(kind, noise=noise).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODELS / "python-12m").save_pretrained(folder)
    return str(folder)
