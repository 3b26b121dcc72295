"""Worse drafts: the model they come from up to the output layer, and as bad as they should be after it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.degraded_drafts import DEGRADED, degrade_checkpoint
from specdec.errors import ModelNotSupported
from tandem.checkpoints import DRAFT, MODELS

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 8]])


@pytest.mark.parametrize("name", DEGRADED)
def test_hidden_states_stay_and_tokens_go(name: str, tmp_path: Path) -> None:
    degrade_checkpoint(MODELS / DRAFT, tmp_path / name, DEGRADED[name])
    good = AutoModelForCausalLM.from_pretrained(MODELS / DRAFT)
    degraded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert (tmp_path / name / "tokenizer.json").is_file()
    with torch.inference_mode():
        ours, theirs = good(TOKENS, output_hidden_states=True), degraded(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(ours.hidden_states[-1], theirs.hidden_states[-1])
    same = (ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean()
    rows = (ours.logits.sort().values - theirs.logits.sort().values).abs().max()
    if DEGRADED[name] is None:
        assert same == 0
        assert rows < 1e-3, "shuffled rows give the same logits in another order"
    else:
        assert rows > 0.1


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    shutil.copyfile(MODELS / DRAFT / "config.json", tmp_path / "source" / "config.json")
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ModelNotSupported, match="neither"):
        degrade_checkpoint(tmp_path / "source", tmp_path / "out", None)
