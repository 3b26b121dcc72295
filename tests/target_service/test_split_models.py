"""Every kind of model, split over 2 and 4 ranks: logits as of one process, texts as without drafts (`make test-tp`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.launcher.deployment import free_port
from tests.target_service.conftest import CONTEXT, VOCAB
from tests.target_service.split_models import settings_of

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2 = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
#: With recurrent states. Of Granite all heads share one group of B and C.
HYBRIDS = {
    "qwen3_5_text": DELTA_NET | {"head_dim": 8},
    "qwen3_next": DELTA_NET
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    | {"shared_expert_intermediate_size": 48},
    "granitemoehybrid": MAMBA2
    | {"mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 96}
    | {"layer_types": ["mamba", "attention"]},
    "bamba": MAMBA2 | {"mamba_n_groups": 2, "attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_n_groups": 4, "mamba_d_ssm": 128, "head_dim": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 16, "mamba_head_dim": 8}
    | {"n_groups": 4, "ssm_state_size": 16, "chunk_size": 16, "num_hidden_layers": 3, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # its embedding is its output layer
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    | {"expert_layer_offset": 1, "mamba_d_state": 6},
    "zamba2": {"layers_block_type": ["hybrid", "hybrid"], "mamba_d_state": 16, "mamba_ngroups": 2, "n_mamba_heads": 16}
    | {"mamba_headdim": 8, "chunk_size": 16, "num_mem_blocks": 1},
}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 20},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.25},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {},
    "qwen2_two_kv_heads": {"num_key_value_heads": 2},
    "qwen3_one_kv_head": {"num_key_value_heads": 1, "head_dim": 8},
    "llama_one_kv_head": {"num_key_value_heads": 1, "attention_bias": True},
    "granitemoe_two_kv_heads": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2_three_kv_heads": {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
}
HYBRIDS["nemotron_h_one_matrix"] = HYBRIDS["nemotron_h"] | {"tie_word_embeddings": True}
#: KV heads in all, of models that have another number than :data:`COMMON`.
KV_HEADS = {"opt": 8, "gpt_neox": 8, "qwen2_two_kv_heads": 2, "qwen3_one_kv_head": 1, "llama_one_kv_head": 1}
#: KV heads of each rank, of models whose attention is not split.
WHOLE_KV_HEADS = {"granitemoe_two_kv_heads": 2, "jamba": 4}
#: Of hybrids what a rank of 2 or 4 has of all weights: norms, and what ranks share of Mamba2, are whole. So are the
#: convolutions of LFM2, and all but the experts of Jamba.
SHARES = {
    "qwen3_5_text": {2: 0.502, 4: 0.253},
    "qwen3_next": {2: 0.503, 4: 0.255},
    "granitemoehybrid": {2: 0.515, 4: 0.273},
    "bamba": {2: 0.525, 4: 0.301},
    "falcon_h1": {2: 0.519, 4: 0.275},
    "nemotron_h": {2: 0.532, 4: 0.298},
    "nemotron_h_one_matrix": {2: 0.502, 4: 0.253},
    "lfm2": {2: 0.564, 4: 0.346},
    "jamba": {2: 0.786, 4: 0.678},
}

#: Parameters of which every rank has all: norms, routers, what is added after a sum, and what no plan names.
REPLICATED = re.compile(
    r"norm|mlp\.gate\.|(o_proj|out_proj|fc2|dense|dense_4h_to_h)\.bias|embed_in|decoder\.embed_(tokens|positions)"
)


def build(name: str) -> PreTrainedModel:
    kind = re.sub("_(one|two|three)_.*", "", name)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **(MODELS | HYBRIDS)[name]}))


def bytes_of_a_rank(name: str, size: int) -> float:
    """What each of ``size`` ranks needs for the weights of a model."""
    replicated = re.compile(REPLICATED.pattern + r"|self_attn|router") if name in WHOLE_KV_HEADS else REPLICATED
    num_parts = dict.fromkeys(("k_proj", "v_proj"), min(size, KV_HEADS.get(name, 4)))
    with torch.device("meta"):
        model = build(name)
    return sum(
        parameter.nbytes if replicated.search(key) else parameter.nbytes / num_parts.get(key.split(".")[-2], size)
        for key, parameter in model.named_parameters()
    )


def whole_bytes(name: str) -> int:
    """Of all weights of a model, those of one matrix once."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in build(name).parameters())


def save(names: Iterable[str], folder: Path) -> list[str]:
    """Checkpoints of models."""
    made = []
    for name in names:
        torch.manual_seed(0)
        made.append(str(folder / name))
        build(name).save_pretrained(made[-1])
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Checkpoints of all models without recurrent states."""
    return save(MODELS, tmp_path_factory.mktemp("models"))


def results_of(folders: list[str], size: int, num_hosts: int) -> dict[str, Any]:
    """``num_hosts`` 2: ranks take each other to be on other hosts, so they meet through gloo."""
    everywhere = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size // num_hosts),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.target_service.split_models", *folders],
            env={**os.environ, **everywhere, "RANK": str(rank), "LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=None if rank else subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=280)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {line.pop("model"): line for line in map(json.loads, output.decode().splitlines())}


@pytest.mark.exhaustive
def test_split_models_in_graphs(folders: list[str]) -> None:
    """Ranks capture and replay in step, and where one of them cannot, none does."""
    result = results_of(["--graphs", folders[0]], 2, 1)["llama"]
    assert result["difference"] < 1e-4
    assert (result["changed"], result["distinct"]) == ([], 8)
    assert result["captured"] > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_split_models(folders: list[str], size: int, num_hosts: int) -> None:
    results = results_of(folders, size, num_hosts)
    assert results.keys() == MODELS.keys()
    assert "GPT2LMHeadModel has no tensor-parallel plan" in results.pop("gpt2")["refused"]
    assert "3 KV heads (num_key_value_heads), which can neither" in results.pop("qwen2_three_kv_heads")["refused"]
    check(results, size)


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 4])
def test_split_hybrids(size: int, tmp_path: Path) -> None:
    results = results_of(save(HYBRIDS, tmp_path), size, 1)
    assert results.keys() == HYBRIDS.keys()
    assert "Zamba2ForCausalLM has no tensor-parallel plan" in results.pop("zamba2")["refused"]
    check(results, size)


def check(results: dict[str, Any], size: int) -> None:
    """Logits, texts and shares of memory of split models."""
    for name, result in results.items():
        assert result["difference"] < 1e-4, name
        assert result["changed"] == [], name
        assert result["distinct"] == 8, name
        assert result["kv_heads"] == WHOLE_KV_HEADS.get(name, max(1, KV_HEADS.get(name, 4) // size)), name
        if name in SHARES:
            shares = [num_bytes / whole_bytes(name) for num_bytes in result["weight_bytes"]]
            assert shares == pytest.approx([SHARES[name][size]] * size, abs=0.01), name
        else:
            assert result["weight_bytes"] == pytest.approx([bytes_of_a_rank(name, size)] * size, abs=256), name
        smallest = settings_of("any", size, rank=size - 1).kv_cache_memory_bytes
        assert smallest * 0.9 < result["kv_cache_bytes"] <= smallest, name
