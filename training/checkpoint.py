"""Saving: a finished model folder that nobody sees half-written, and the state to resume from."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.tokenizer import save_tokenizer


def round_weights(model: LlamaForCausalLM) -> None:
    """Rounds every weight to bfloat16 in place, keeping its dtype: what will be stored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes `folder`: weights stored as bfloat16, to be loaded as float32, and the tokenizer.

    All is written beside `folder` and then renamed into place; a README.md there is kept.
    """
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    stored = LlamaForCausalLM(model.config).bfloat16()
    stored.load_state_dict(model.state_dict())
    end = tokenizer.eos_token_id
    stored.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    stored.save_pretrained(fresh)
    model.config.dtype = torch.float32
    config = json.loads((fresh / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    text = json.dumps(config, indent=2) + "\n"
    (fresh / "config.json").write_text(text, encoding="utf-8")
    save_tokenizer(tokenizer, fresh)
    (fresh / "model.safetensors").chmod(0o644)
    if (folder / "README.md").exists():
        shutil.copy(folder / "README.md", fresh)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Loads the model saved in `folder`, in the dtype its configuration names."""
    return LlamaForCausalLM.from_pretrained(folder, dtype="auto")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a resumable training state in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.rename(path)
