"""Every kind of model, split over 2 and 4 ranks: logits as of one process, texts as without drafts (`make test-tp`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.launcher.deployment import free_port
from tests.target_service.conftest import CONTEXT, VOCAB

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
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 20},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.25},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Checkpoints of all models, and a Qwen2 whose KV heads do not divide by 4."""
    made = []
    for name, special in [*MODELS.items(), ("qwen2_two_kv_heads", {"num_key_value_heads": 2})]:
        torch.manual_seed(0)
        kind = name.partition("_two")[0]
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**COMMON, **special}))
        made.append(str(tmp_path_factory.mktemp("models") / name))
        model.save_pretrained(made[-1])
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_split_models(folders: list[str], size: int, num_hosts: int) -> None:
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
    results = {line.pop("model"): line for line in map(json.loads, output.decode().splitlines())}
    assert results.keys() == {*MODELS, "qwen2_two_kv_heads"}
    assert "GPT2LMHeadModel has no tensor-parallel plan" in results.pop("gpt2")["refused"]
    if size == 4:
        assert "2 heads (num_key_value_heads)" in results.pop("qwen2_two_kv_heads")["refused"]
    for name, result in results.items():
        assert result["difference"] < 1e-4, name
        assert result["changed"] == [], name
        assert result["distinct"] == 8, name
