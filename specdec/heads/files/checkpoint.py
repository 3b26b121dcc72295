"""Heads from the folders they are published in, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from specdec.errors import InvalidRequest
from specdec.heads.files.eagle import EAGLE
from specdec.heads.files.eagle3 import EAGLE3
from specdec.heads.files.head_format import HeadFormat
from specdec.heads.files.medusa import MEDUSA
from specdec.heads.files.mlp_speculator import MLP_SPECULATOR
from specdec.heads.files.tensors import TargetTensors, read_config, read_tensors
from specdec.heads.head import DraftHead
from specdec.methods import method_of

#: All kinds of heads by their methods.
FORMATS: Final[dict[str, HeadFormat[Any]]] = {
    each.head.method: each for each in (EAGLE, EAGLE3, MEDUSA, MLP_SPECULATOR)
}


def read_head(
    folder: str | Path,
    target_folder: str | Path,
    *,
    method: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> DraftHead:
    """The head in ``folder``, with what it shares with the target in ``target_folder``; in evaluation mode.

    ``method`` None means what the files are made for; ``dtype`` None that of the head's own weights.

    Raises:
        InvalidRequest: files are missing or damaged, or the folder holds no head of that method.
        ModelNotSupported: a variant that is not known, or that does not fit the target; the text names the field.
    """
    folder, method = Path(folder), method or method_of(str(folder))
    config, target = read_config(folder), TargetTensors(Path(target_folder))
    if method not in FORMATS:
        raise InvalidRequest(f"{folder} holds no draft head but a {method}", param="model")
    head: DraftHead = FORMATS[method].read(folder, config, read_tensors(folder), target)
    return head.to(device=device, dtype=dtype or head.dtype).eval().requires_grad_(False)


def write_head(head: DraftHead, folder: str | Path) -> None:
    """Write a head as published: ``config.json`` and one safetensors file, without what it shares with its target."""
    folder, form = Path(folder), FORMATS[head.method]
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in form.tensors_of(head).items()}
    save_file(tensors, folder / form.file)
    dtype = str(head.dtype).removeprefix("torch.")
    text = json.dumps({**form.config_of(head), "torch_dtype": dtype}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
