"""The benchmark of recurrent layers, on tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import hybrids
from benchmarks.hybrids import DECODE, PROMPT, SHAPES, VERIFY, load_shape, measure, table_of

_TINY = {
    "Qwen3.5": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "intermediate_size": 32,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "Llama": {"num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 8},
}


def test_a_report_has_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrids, "SIZES", {**hybrids.SIZES, "hidden_size": 32, "num_attention_heads": 4})
    monkeypatch.setattr(hybrids, "_READ_BYTES", 2**20)
    monkeypatch.setattr(hybrids, "SHAPES", {name: (SHAPES[name][0], options) for name, options in _TINY.items()})
    shapes = {name: load_shape(name, tmp_path / name, None, 1) for name in _TINY}
    bandwidth = measure(list(shapes.values()), 0.0, 1)
    hybrid, llama = shapes["Qwen3.5"], shapes["Llama"]
    assert hybrid.num_bytes > llama.num_bytes
    assert all(len(shape.times[rows]) == 3 for shape in shapes.values() for rows in (DECODE, VERIFY, PROMPT))
    Console(width=130).print(table_of(shapes, bandwidth))
    assert "Qwen3.5" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_about_200_million_parameters(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **hybrids.SIZES, **options))
    assert 200e6 <= model.num_parameters() <= 235e6
