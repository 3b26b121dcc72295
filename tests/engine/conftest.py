"""Tiny random checkpoints of many architectures, and the engines and stock models that run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine, Segment
from engine.kv_sequence import KVSequence
from engine.loading import load
from specdec.settings import ModelSettings

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
SPARSE_BLOCKS: dict[str, Any] = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 24, **MOE}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_chunk_size": 8,
}
#: Models with recurrent states: name -> (model type, what differs from COMMON).
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **EXPERTS}),
    "lfm3": ("lfm3", {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("qwen3_next", {**DELTA_NET, **EXPERTS}),
    "qwen3_5": ("qwen3_5_text", DELTA_NET),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA_NET, **EXPERTS}),
    "olmo_hybrid": ("olmo_hybrid", DELTA_NET),
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    "granite4": (
        "granitemoehybrid",
        {**MAMBA2, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48},
    ),
    "granite4_moe": (
        "granitemoehybrid",
        {
            **MAMBA2,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
        },
    ),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 6,
            "chunk_size": 8,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["hybrid", "hybrid"],  # of one attention, with two caches
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8}),
    "mamba": ("mamba", {"state_size": 6}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 6}),
    "jamba": (
        "jamba",
        {
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 6,
        },
    ),
    "minimax_lightning": (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "block_size": 100},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_local_experts": 4,
            **LATENT,
            **MOE,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **LATENT,
            **MOE,
        },
    ),
}
#: name -> (model type, what differs from COMMON)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **HYBRIDS,
    "llama": ("llama", {}),
    "llama_long": ("llama", {"max_position_embeddings": 512}),
    "llama_yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral_long": ("mistral", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 24, **MOE}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}),
    "deepseek": (
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            **MOE,
        },
    ),
    "falcon": ("falcon", {"alibi": False}),
    "falcon_heads": ("falcon", {"alibi": False, "multi_query": False, "bias": True, "parallel_attn": False}),
    "falcon_groups": ("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_alibi": ("falcon", {"alibi": True}),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 48}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2, "seq_length": 128}),
    "bloom_three_heads": ("bloom", {"n_head": 3, "n_layer": 2, "hidden_size": 24, "seq_length": 128}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "mpt_six_heads": (
        "mpt",
        {
            "d_model": 24,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"softmax_scale": 0.7, "clip_qkv": 2.0},
        },
    ),
    "codegen": ("codegen", {"rotary_dim": 4}),
    "diffllama": ("diffllama", {}),
    "recurrent_gemma": ("recurrent_gemma", {"attention_window_size": 8, "lru_width": 32}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "llama4": (
        "llama4_text",
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
        },
    ),
    "llama4_tuned": ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 48}),
    "minimax_m3": ("minimax_m3_vl_text", SPARSE_BLOCKS | {"index_block_size": 128}),
    "minimax_m3_short": ("minimax_m3_vl_text", SPARSE_BLOCKS | {"index_block_size": 4, "index_topk_blocks": 2}),
    "minimax_m3_dense": (
        "minimax_m3_vl_text",
        SPARSE_BLOCKS | {"layer_types": ["full_attention"] * 2, "index_block_size": 16},
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 64,
            **MOE,
        },
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}

Checkpoint = Callable[..., str]


def build(name: str, **changes: Any) -> PreTrainedModel:
    """A random model with every weight well away from its initial value, norms included."""
    kind, special = ARCHITECTURES[name]
    torch.manual_seed(7)
    options = {**COMMON, **special, **changes}
    if kind == "falcon":
        del options["head_dim"]  # it follows from the others
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in key and weight.dim() == 1 and "bias" not in key else 0.0, 0.3)
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Saves an architecture's model once; returns its folder."""
    folders: dict[str, str] = {}

    def save(name: str) -> str:
        if name not in folders:
            folder: Path = tmp_path_factory.mktemp(name)
            build(name).save_pretrained(folder)
            folders[name] = str(folder)
        return folders[name]

    return save


@pytest.fixture(scope="session")
def load_engine(checkpoint: Checkpoint) -> Callable[..., Engine]:
    """Loads an engine on a tiny cache: blocks of 4 tokens, 64 of them unless told otherwise."""

    def load_one(name: str, **options: Any) -> Engine:
        settings = {"model": checkpoint(name), "device": "cpu", "num_threads": 1, "block_size": 4, **options}
        return load.load_engine(ModelSettings(**settings))

    return load_one


@pytest.fixture(scope="session")
def load_stock(checkpoint: Checkpoint) -> Callable[[str], PreTrainedModel]:
    """Loads the same checkpoint as transformers runs it."""

    def load(name: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(checkpoint(name), attn_implementation="eager").eval()

    return load


@pytest.fixture(scope="session")
def llama(load_engine: Callable[..., Engine]) -> Engine:
    """One engine for tests that leave its pool as they found it."""
    return load_engine("llama")


@pytest.fixture(scope="session")
def stock_llama(load_stock: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return load_stock("llama")


def stock_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] of a plain forward pass."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def feed(engine: Engine, sequence: KVSequence, token_ids: Sequence[int]) -> torch.Tensor:
    """Feed one sequence; logits [n, V] of every token."""
    return engine.forward([Segment(sequence, token_ids, len(token_ids))])


def random_ids(count: int, seed: int) -> list[int]:
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The plain functions of this file, for test modules (which cannot import it)."""
    return SimpleNamespace(
        architectures=ARCHITECTURES,
        hybrids=HYBRIDS,
        vocab=VOCAB,
        build=build,
        stock_logits=stock_logits,
        feed=feed,
        random_ids=random_ids,
    )
