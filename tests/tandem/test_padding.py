"""Padding changes the cost of a model and nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from specdec.errors import InvalidRequest, ModelNotSupported
from tandem.padding import pad_checkpoint, parse_size

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def save(model, folder: Path) -> str:
    folder.mkdir()
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("make", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config)], ids=["llama", "qwen2"]
)
def test_logits_are_the_same_at_the_wanted_size(tmp_path: Path, make, config) -> None:
    torch.manual_seed(1)
    source = save(make(config(**SHAPE)), tmp_path / "tiny")
    padded = pad_checkpoint(source, 300_000, num_layers=5, cache=tmp_path)
    small, large = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, padded))
    assert large.config.num_hidden_layers == 5
    assert large.num_parameters() == pytest.approx(300_000, rel=0.03)
    tokens = torch.randint(0, 64, (3, 40))
    with torch.no_grad():
        ours, theirs = small(tokens).logits, large(tokens).logits
    # Zeros add exactly nothing; only the order of summation over a longer row may round differently.
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_a_silenced_layer_that_is_not_silent_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug of the test above."""
    torch.manual_seed(1)
    source = save(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "tiny")
    monkeypatch.setattr("tandem.padding._SILENCED", ("o_proj.",))
    padded = pad_checkpoint(source, 300_000, num_layers=5, cache=tmp_path)
    small, large = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, padded))
    tokens = torch.randint(0, 64, (1, 20))
    with torch.no_grad():
        assert (small(tokens).logits - large(tokens).logits).abs().max() > 1e-2


def test_is_made_once(tmp_path: Path) -> None:
    source = save(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "tiny")
    first = pad_checkpoint(source, 300_000, cache=tmp_path)
    made = (Path(first) / "model.safetensors").stat().st_mtime_ns
    assert pad_checkpoint(source, 300_000, cache=tmp_path) == first
    assert (Path(first) / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "padded").iterdir()] == [Path(first).name]


def test_refusals(tmp_path: Path) -> None:
    source = save(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "tiny")
    with pytest.raises(InvalidRequest, match="it is larger"):
        pad_checkpoint(source, 1000, cache=tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ModelNotSupported, match="gate_proj"):
        pad_checkpoint(str(tmp_path / "empty"), 1000, cache=tmp_path)


@pytest.mark.parametrize(("text", "size"), [("200M", 200_000_000), ("1.5b", 1_500_000_000), ("30000", 30_000)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="200M"):
        parse_size("big")
