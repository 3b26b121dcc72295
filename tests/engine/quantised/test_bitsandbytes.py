"""Checkpoints that transformers writes with bitsandbytes: the weights are what bitsandbytes decodes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from engine.checkpoint_files import CheckpointFiles
from engine.loading import load
from engine.loading.assembly import PackedSource
from specdec.settings import ModelSettings

_4_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", _4_BITS),
        ("qwen3", {**_4_BITS, "bnb_4bit_use_double_quant": True}),
        ("mistral", {**_4_BITS, "bnb_4bit_quant_type": "fp4"}),
        ("qwen2", {"load_in_8bit": True}),
        ("gemma2", _4_BITS),  # by transformers
        ("phi3", {"load_in_8bit": True}),
    ],
)
def test_a_file_is_read_as_bitsandbytes_does(
    name: str, options: dict[str, Any], tmp_path: Path, tools: SimpleNamespace
) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    tools.build(name, hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(plain)
    config = BitsAndBytesConfig(**options)
    stored = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
    stored.save_pretrained(folder)
    layers = [name for name, layer in stored.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    model = stored.dequantize(dtype=torch.float32).eval()
    files, rounding = CheckpointFiles(folder), 0.0 if "load_in_4bit" in options else 2**-22  # the latter multiply twice
    is_read = files.stored_format is not None
    with ExitStack() as stack:
        source = PackedSource(files, files.stored_format, stack) if files.stored_format is not None else None
        for layer in layers if source is not None else ():
            weight = source.linear(layer)
            assert weight is not None
            torch.testing.assert_close(weight.decode(), model.get_submodule(layer).weight, atol=0, rtol=rounding)

    settings = ModelSettings(model=str(folder), device="cpu", num_threads=1, block_size=4)
    engine = load.load_engine(settings)
    assert engine.runner.name == ("native decoder" if is_read else "native attention")
    assert engine.info.num_parameters == model.num_parameters()
    ids = tools.random_ids(20, seed=3)
    wanted = tools.stock_logits(model, ids)
    error = (tools.feed(engine, engine.pool.open(20), ids) - wanted).square().mean().sqrt() / wanted.std()
    assert float(error) < (0.15 if is_read and rounding else 1e-5)  # activations of 8 bits
