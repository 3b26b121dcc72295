"""Models that cannot be split are refused by name, before their weights are read."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.parallel.ranks import Place, Ranks
from engine.parallel.shards import make_local, plan_split
from specdec.errors import ModelNotSupported
from tests.engine.conftest import ARCHITECTURES, COMMON


def config_of(name: str, **changes: Any) -> Any:
    kind, special = ARCHITECTURES[name]
    return AutoConfig.for_model(kind, **{**COMMON, **special, **changes})


def plan_of(name: str, size: int, **changes: Any) -> Any:
    split: Any = plan_split(config_of(name, **changes), size, trust_remote_code=False)
    assert split.tp_size == size
    return split.tp_plan


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt_neox", "opt", "gemma2"])
def test_known_plans(name: str) -> None:
    assert "replicate" not in (plan_of(name, 2) or {}).values()


@pytest.mark.parametrize("name", ["bamba", "falcon_h1", "granite4", "nemotron_h", "minimax_lightning", "jamba"])
def test_hybrids_have_plans(name: str) -> None:
    assert "replicate" not in (plan_of(name, 2) or {}).values()


def test_what_recurrent_layers_of_a_plan_have_is_read_whole() -> None:
    """:mod:`engine.parallel.split_mixers` takes its part."""
    plan = plan_of("qwen3_5", 2)
    assert set(plan.values()) == {"replicate"}
    assert {rule.rpartition(".")[2] for rule in plan} == {f"in_proj_{part}" for part in ("qkv", "z", "b", "a")} | {
        "out_proj"
    }


def test_an_embedding_that_is_the_output_layer_is_split_as_that() -> None:
    rules = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    assert rules.items() <= plan_of("lfm2", 2).items()
    assert "model.embed_tokens" not in plan_of("bamba", 2)
    assert plan_of("nemotron_h", 2, tie_word_embeddings=True)["lm_head"] == "colwise_gather_output"


@pytest.mark.parametrize(("name", "num_kv_heads", "size"), [("llama", 1, 2), ("qwen3", 1, 4), ("qwen2", 2, 4)])
def test_fewer_kv_heads_than_ranks(name: str, num_kv_heads: int, size: int) -> None:
    assert plan_of(name, size, num_key_value_heads=num_kv_heads) == {
        "model.layers.*.self_attn.k_proj": "replicate",
        "model.layers.*.self_attn.v_proj": "replicate",
    }


def test_a_rank_holds_the_kv_head_that_its_heads_attend_to() -> None:
    """Four ranks with two heads each: eight heads share two KV heads, so the first four use the first one."""
    changes = {"num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}
    whole = AutoModelForCausalLM.from_config(config_of("llama", **changes))
    for rank in range(4):
        model = copy.deepcopy(whole)
        model.tp_plan = plan_of("llama", 4, **changes)  # what else transformers splits is whole here
        make_local(model, cast("Ranks", SimpleNamespace(place=Place(rank, 4, rank, 4))))
        own, given = model.model.layers[1].self_attn, whole.model.layers[1].self_attn
        assert own.num_key_value_groups == 2
        for leaf in ("k_proj", "v_proj"):
            rows = slice(rank // 2 * given.head_dim, (rank // 2 + 1) * given.head_dim)
            assert torch.equal(getattr(own, leaf).weight, getattr(given, leaf).weight[rows])
            assert torch.equal(getattr(own, leaf).bias, getattr(given, leaf).bias[rows])


def test_attention_that_a_plan_leaves_whole_stays_as_it_is() -> None:
    """granitemoe's plan splits its experts only, so each rank has all heads."""
    config = AutoConfig.for_model(
        "granitemoe", **{**COMMON, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 4}
    )
    model = AutoModelForCausalLM.from_config(config)
    make_local(model, cast("Ranks", SimpleNamespace(place=Place(0, 4, 0, 4))))
    assert model.model.layers[1].self_attn.num_key_value_groups == 4


@pytest.mark.parametrize(
    ("name", "changes", "size", "text"),
    [
        (
            "qwen2",
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "Qwen2ForCausalLM has 3 KV heads (num_key_value_heads), which can neither be split over"
            " tensor_parallel_size 4 nor repeated on it: choose a divisor of 3",
        ),
        ("qwen2", {"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "choose a divisor of 4"),
        ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4, "LlamaForCausalLM has 6 heads"),
        ("opt", {}, 3, "OPTForCausalLM has 4 heads (num_attention_heads), which do not divide"),
        ("gpt2", {}, 2, "GPT2LMHeadModel has no tensor-parallel plan in transformers"),
        ("zamba2", {}, 2, "Zamba2ForCausalLM has no tensor-parallel plan in transformers"),
        ("olmo_hybrid", {}, 2, "OlmoHybridForCausalLM has a plan with styles that are unknown here"),
        ("phi3", {}, 2, "Phi3ForCausalLM has a plan with styles that are unknown here (rowwise_split_input)"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 2, "'llama' is quantised already"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], size: int, text: str) -> None:
    with pytest.raises(ModelNotSupported) as caught:
        plan_split(config_of(name, **changes), size, trust_remote_code=False)
    assert text in str(caught.value)
