"""Checkpoints of models of text and images: their text part runs, and answers as the whole does without images."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.engine import Segment
from engine.loading.load import load_engine
from specdec.settings import ModelSettings

TEXT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
TOWER: Final = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
THREE_AXES: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
#: Model type -> (text_config, vision_config).
FAMILIES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "qwen3_5": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
        QWEN_TOWER,
    ),
    "qwen3_vl": ({}, {**QWEN_TOWER, "deepstack_visual_indexes": [0]}),
    "qwen2_5_vl": ({"rope_parameters": THREE_AXES}, QWEN_TOWER),
    "gemma3": ({}, TOWER),
    "mistral3": ({"model_type": "mistral"}, {**TOWER, "head_dim": 16}),
    "lfm2_vl": ({"layer_types": ["conv", "full_attention"]}, TOWER),
    "llama4": (
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 128,
            "attn_temperature_tuning": False,
        },
        {**TOWER, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_that_of_the_whole_model(name: str, tmp_path: Path, tools: SimpleNamespace) -> None:
    text, vision = FAMILIES[name]
    config = AutoConfig.for_model(name, text_config={**TEXT, **text}, vision_config=vision)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(1.0 if "norm" in key and weight.dim() == 1 and "bias" not in key else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    engine = load_engine(ModelSettings(model=str(tmp_path), device="cpu", num_threads=1, block_size=4))
    ids = tools.random_ids(30, seed=1)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([ids])).logits[0]
    sequence = engine.pool.open(40)
    first = engine.forward([Segment(sequence, [*ids[:11], 5, 6, 7], 14)])[:11]
    engine.pool.rollback(sequence, 11)
    rest = engine.forward([Segment(sequence, ids[11:], 19)])
    torch.testing.assert_close(torch.cat((first, rest)), wanted, atol=2e-4, rtol=1e-4)
