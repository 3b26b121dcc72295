"""The small hybrid: at first it writes what the Llama in it writes, and it learns in its recurrent layers alone."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tandem.checkpoints import MODELS
from tandem.training.checkpoint import load_model, round_weights, save_model
from tandem.training.hybrid import grow_hybrid
from tandem.training.optimizer import OptimizerSettings
from tandem.training.pretrain import PretrainSettings, pretrain
from tandem.training.schedule import ScheduleSettings
from tandem.training.tokenizer import load_tokenizer


def test_it_begins_with_the_same_text_and_learns(tmp_path: Path) -> None:
    torch.manual_seed(1)
    llama = load_model(MODELS / "python-12m").eval()
    hybrid = grow_hybrid(llama)
    before = {name: part.clone() for name, part in hybrid.named_parameters()}
    text = torch.randint(4096, (1, 100))
    with torch.inference_mode():
        torch.testing.assert_close(hybrid(text).logits, llama(text).logits, atol=1e-3, rtol=1e-3)
    settings = PretrainSettings(
        schedule=ScheduleSettings(num_steps=2, warmup_steps=0),
        optimizer=OptimizerSettings(matrix_rate=3e-3, other_rate=3e-3),
        batch_tokens=64,
        row_length=32,
        long_row_length=32,
        compiled=False,
    )
    assert pretrain(hybrid, [torch.randint(4096, (400,)) for _ in range(3)], settings) == 128
    changed = {name for name, part in hybrid.named_parameters() if not part.equal(before[name])}
    recurrent = {name for name in before if name.startswith(("model.layers.0.", "model.layers.3.", "model.layers.6."))}
    assert changed <= recurrent
    assert any("mamba.out_proj" in name for name in changed)
    round_weights(hybrid)
    save_model(hybrid, load_tokenizer(MODELS / "python-12m"), tmp_path / "hybrid")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(loaded(text).logits, hybrid(text).logits)
