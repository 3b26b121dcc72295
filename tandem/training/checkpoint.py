"""Saving: a finished model folder that nobody sees half-written, and the state to resume from."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine.heads.files.checkpoint import write_head
from engine.heads.head import DraftHead
from tandem.training.tokenizer import save_tokenizer

#: Files a tokenizer may consist of.
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "chat_template*")


def round_weights(model: nn.Module) -> None:
    """Rounds every weight to bfloat16 in place, keeping its dtype: what will be stored."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes `folder`: weights stored as bfloat16, to be loaded as float32, and the tokenizer.

    All is written beside `folder` and then renamed into place; a README.md there is kept.
    """
    with _replaced(folder) as fresh:
        _write_model(model, fresh)
        save_tokenizer(tokenizer, fresh)


def save_draft(model: LlamaForCausalLM, target_folder: Path, folder: Path) -> None:
    """The same with the tokenizer of the target, file by file."""
    with _replaced(folder) as fresh:
        _write_model(model, fresh)
        for pattern in _TOKENIZER_FILES:
            for file in target_folder.glob(pattern):
                shutil.copy(file, fresh)


def save_head(head: DraftHead, folder: Path) -> None:
    """Writes a head as published, in bfloat16, in one piece."""
    with _replaced(folder) as fresh:
        write_head(copy.deepcopy(head).bfloat16(), fresh)


def name_window(folder: Path, size: int) -> None:
    """Name in a drafter's configuration the longest text that it is to read."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"draft_window_size": size}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path) -> LlamaForCausalLM:
    """Loads the model saved in `folder`, in the dtype its configuration names."""
    return LlamaForCausalLM.from_pretrained(folder, dtype="auto")


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes a resumable training state in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    torch.save(state, fresh)
    fresh.rename(path)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `folder` once all is written."""
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    for file in fresh.glob("*.safetensors"):
        file.chmod(0o644)
    if (folder / "README.md").exists():
        shutil.copy(folder / "README.md", fresh)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    stored = copy.deepcopy(model).bfloat16()
    end = model.config.eos_token_id
    stored.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    stored.save_pretrained(folder)
    model.config.dtype = torch.float32
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float32"
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
