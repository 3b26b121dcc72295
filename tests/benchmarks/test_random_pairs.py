"""Pairs of random weights: their size, and that the draft is most of the time right."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_pairs import SHAPES, write_pair


@pytest.mark.parametrize(("name", "num_parameters"), [("1B", 1_100_048_384), ("7B", 6_738_415_616)])
def test_shapes_are_those_of_their_models(name: str, num_parameters: int) -> None:
    assert SHAPES[name].num_parameters == num_parameters


def test_weights_that_are_read_and_entries_that_are_kept() -> None:
    shape = SHAPES["tiny"]
    model = AutoModelForCausalLM.from_config(shape.config(shape.num_layers, 64))
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.num_parameters - shape.num_read == model.model.embed_tokens.weight.numel()
    with torch.inference_mode():
        cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kept == 3 * shape.kv_per_token


def test_the_draft_is_the_targets_first_layers_with_a_noisy_output(tmp_path: Path) -> None:
    folders = write_pair(SHAPES["tiny"], tmp_path, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    assert (target.config.num_hidden_layers, draft.config.num_hidden_layers) == (3, 1)
    ids = torch.randint(4096, (20, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        hidden = [model.model(ids).last_hidden_state for model in (target, draft)]
        tokens = [model(ids).logits.argmax(-1) for model in (target, draft)]
    torch.testing.assert_close(*hidden)
    assert 0.7 < (tokens[0] == tokens[1]).float().mean() < 0.9
    assert max(int(found.max()) for found in tokens) < 4096, "the tokenizer knows every token"
