"""Models that cannot be split are refused by name, before their weights are read."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from specdec.engine.parallel.shards import check_plan
from specdec.errors import ModelNotSupported
from tests.specdec.engine.conftest import ARCHITECTURES, COMMON


def config_of(name: str, **changes: Any) -> Any:
    kind, special = ARCHITECTURES[name]
    return AutoConfig.for_model(kind, **{**COMMON, **special, **changes})


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt_neox", "opt", "gemma2"])
def test_known_plans(name: str) -> None:
    check_plan(config_of(name), 2, trust_remote_code=False)


@pytest.mark.parametrize(
    ("name", "changes", "size", "text"),
    [
        ("qwen2", {}, 4, "Qwen2ForCausalLM has 2 heads (num_key_value_heads), which do not divide"),
        ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4, "LlamaForCausalLM has 6 heads"),
        ("opt", {}, 3, "OPTForCausalLM has 4 heads (num_attention_heads), which do not divide"),
        ("gpt2", {}, 2, "GPT2LMHeadModel has no tensor-parallel plan in transformers"),
        ("phi3", {}, 2, "Phi3ForCausalLM is split in a way that is not available here (rowwise_split_input)"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, 2, "'llama' is quantised already"),
    ],
)
def test_refusals(name: str, changes: dict[str, Any], size: int, text: str) -> None:
    with pytest.raises(ModelNotSupported) as caught:
        check_plan(config_of(name, **changes), size, trust_remote_code=False)
    assert text in str(caught.value)
