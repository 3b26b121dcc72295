"""Models with recurrent layers on the native decoder: every option of their families, as transformers computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine, Segment
from engine.loading import load
from engine.native.runner import NativeRunner
from engine.runner import Results
from specdec.settings import ModelSettings

pytestmark = pytest.mark.usefixtures("kernels")

MAMBA_BIASES = {"mamba_proj_bias": True, "mamba_conv_bias": True}
ATTENTION_LAST = {"layer_types": ["mamba", "attention"], "num_local_experts": 0}
#: What differs from the models of the other tests, by a family and a name.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "lfm2 with biases, a convolution last": ("lfm2", {"layer_types": ["full_attention", "conv"], "conv_bias": True}),
    "qwen3.5 with biases, more values, recurrent last": (
        "qwen3_5",
        {
            "layer_types": ["full_attention", "linear_attention"],
            "attention_bias": True,
            "linear_value_head_dim": 72,
            "linear_key_head_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3.5, tied": ("qwen3_5", {"tie_word_embeddings": True}),
    "bamba": ("bamba", {**MAMBA_BIASES, "attention_bias": True, "mlp_bias": True}),
    "granite": (
        "granite4",
        {
            **ATTENTION_LAST,
            **MAMBA_BIASES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
            "position_embedding_type": "rope",
        },
    ),
    "granite without positions": ("granite4", {**ATTENTION_LAST, "position_embedding_type": None}),
    "falcon": (
        "falcon_h1",
        {
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.3,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 0.8,
            "ssm_out_multiplier": 1.4,
            "ssm_multipliers": [0.5, 0.9, 1.1, 1.2, 0.7],
            "mlp_multipliers": [0.6, 1.7],
        },
    ),
    "falcon with a norm": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, **MAMBA_BIASES}),
    "nemotron": ("nemotron_h", {"use_bias": True, "mlp_bias": True}),
    "nemotron, attention last": ("nemotron_h", {"layers_block_type": ["mlp", "mamba", "attention"]}),
}

Made = tuple[Engine, PreTrainedModel]


@pytest.fixture(scope="module")
def make(tools: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """An engine of a model with some options, and the stock model."""

    def make_one(name: str, **settings: Any) -> Made:
        family, options = OPTIONS[name]
        folder: Path = tmp_path_factory.mktemp(family)
        tools.build(family, **options).save_pretrained(folder)
        given = {"device": "cpu", "num_threads": 2, "block_size": 4, **settings}
        engine = load.load_engine(ModelSettings(model=str(folder), **given))
        return engine, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()

    return make_one


def fed(engine: Engine, text: list[int], counts: list[int]) -> torch.Tensor:
    """Logits [n, V] of a text in chunks."""
    sequence = engine.pool.open(len(text))
    rows = []
    for count in counts:
        part = text[sequence.length :][:count]
        rows.append(engine.forward([Segment(sequence, part, len(part))]))
    engine.pool.release(sequence)
    return torch.cat(rows)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_the_stock_model(name: str, make: Callable[..., Made], tools: SimpleNamespace) -> None:
    engine, stock = make(name)
    assert engine.runner.name == "native decoder"
    text = tools.random_ids(100, 4)
    one_pass = fed(engine, text, [100])
    torch.testing.assert_close(one_pass, tools.stock_logits(stock, text), atol=5e-4, rtol=1e-4)
    assert fed(engine, text, [1, 70, 5, 1, 1, 22]).equal(one_pass), "to the bit"


@pytest.mark.parametrize("name", ["qwen3.5, tied", "granite", "nemotron", "falcon"])
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_bfloat16_and_int8(
    name: str, settings: dict[str, Any], make: Callable[..., Made], tools: SimpleNamespace
) -> None:
    engine, stock = make(name, **settings)
    assert engine.runner.name == "native decoder"
    text = tools.random_ids(60, 5)
    one_pass, wanted = fed(engine, text, [60]), tools.stock_logits(stock, text)
    assert (one_pass - wanted).square().mean(-1).sqrt().median() < 0.1 * wanted.std()
    assert fed(engine, text, [7, 1, 40, 5, 7]).equal(one_pass), "to the bit"


@pytest.mark.parametrize("name", ["lfm2 with biases, a convolution last", "falcon", "nemotron", "granite"])
def test_hidden_states_between_all_layers(name: str, make: Callable[..., Made], tools: SimpleNamespace) -> None:
    """Of Nemotron-H also behind the last layer in which rows meet."""
    engine, stock = make(name)
    text, rows, stack = tools.random_ids(12, 6), 5, stock.model.layers
    boundaries: list[torch.Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: boundaries.append(args[0][0])) for layer in stack]
    output = stock.get_output_embeddings()
    hooks.append(output.register_forward_pre_hook(lambda _, args: boundaries.append(args[0][0])))
    tools.stock_logits(stock, text)
    for hook in hooks:
        hook.remove()
    layers = (*range(len(stack)), -1)
    for num_logits in (0, 1, len(text)):
        sequence = engine.pool.open(len(text))
        segment = Segment(sequence, text, num_logits, rows, layers)
        _, states = engine.forward_with_states([segment])
        wanted = torch.cat([boundary[-rows:] for boundary in boundaries], dim=1)
        torch.testing.assert_close(states.of(0).float(), wanted, rtol=2**-8, atol=2e-3)
        engine.pool.release(sequence)


@pytest.mark.parametrize("name", ["granite", "falcon", "nemotron"])
def test_the_modules_run_on_what_was_packed(
    name: str, make: Callable[..., Made], tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the native decoder fails the check at load. Granite's layer for gate and up is packed as two, in turn."""

    def fail(*_: object) -> Results:
        raise RuntimeError("broken")

    monkeypatch.setattr(NativeRunner, "forward", fail)
    engine, stock = make(name)
    assert engine.runner.name == "native attention"
    text = tools.random_ids(20, 8)
    torch.testing.assert_close(fed(engine, text, [9, 11]), tools.stock_logits(stock, text), atol=5e-4, rtol=1e-4)
