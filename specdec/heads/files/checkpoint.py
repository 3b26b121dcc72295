"""Heads from the folders they are published in, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file

from specdec.errors import InvalidRequest
from specdec.heads.eagle import EagleHead
from specdec.heads.eagle3 import Eagle3Head
from specdec.heads.files import eagle as eagle_files
from specdec.heads.files import medusa as medusa_files
from specdec.heads.files import mlp_speculator as mlp_files
from specdec.heads.files.tensors import TargetTensors, read_config, read_tensors
from specdec.heads.medusa import MedusaHeads
from specdec.heads.mlp_speculator import MlpSpeculator
from specdec.methods import method_of

Head: TypeAlias = EagleHead | Eagle3Head | MedusaHeads | MlpSpeculator


def read_head(
    folder: str | Path,
    target_folder: str | Path,
    *,
    method: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Head:
    """The head in ``folder``, with what it shares with the target in ``target_folder``; in evaluation mode.

    ``method`` None means what the files are made for; ``dtype`` None that of the head's own weights.

    Raises:
        InvalidRequest: files are missing or damaged, or the folder holds no head of that method.
        ModelNotSupported: a variant that is not known, or that does not fit the target; the text names the field.
    """
    folder, method = Path(folder), method or method_of(str(folder))
    config, target = read_config(folder), TargetTensors(Path(target_folder))
    head: Head
    match method:
        case "eagle":
            head = eagle_files.read_eagle(folder, config, read_tensors(folder), target)
        case "eagle3":
            head = eagle_files.read_eagle3(folder, config, read_tensors(folder), target)
        case "medusa":
            head = medusa_files.read_medusa(folder, config, read_tensors(folder), target)
        case "mlp_speculator":
            head = mlp_files.read_mlp_speculator(folder, config, read_tensors(folder), target)
        case _:
            raise InvalidRequest(f"{folder} holds no draft head but a {method}", param="model")
    return head.to(device=device, dtype=dtype or _dtype_of(head)).eval().requires_grad_(False)


def write_head(head: Head, folder: str | Path) -> None:
    """Write a head as published: ``config.json`` and one safetensors file, without what it shares with its target."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    dtype = str(_dtype_of(head)).removeprefix("torch.")
    name = "model.safetensors"
    match head:
        case EagleHead():
            config = eagle_files.eagle_config_of(head)
        case Eagle3Head():
            config = eagle_files.eagle3_config_of(head)
        case MedusaHeads():
            config, name = medusa_files.medusa_config_of(head), "medusa_lm_head.safetensors"
        case MlpSpeculator():
            config, repeated = mlp_files.mlp_config_of(head), mlp_files.repeated(head.config)
            tensors = {mlp_files.PREFIX + key: tensor for key, tensor in tensors.items() if key not in repeated}
    shared = shared_names(head)
    save_file({key: tensor for key, tensor in tensors.items() if key not in shared}, folder / name)
    text = json.dumps({**config, "torch_dtype": dtype}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def shared_names(head: Head) -> frozenset[str]:
    """Names of the tensors that are the target's."""
    match head:
        case EagleHead():
            owned = {"embed_tokens.weight": head.config.owns_embeddings, "lm_head.weight": False}
        case Eagle3Head():
            config = head.config
            owned = {"embed_tokens.weight": config.owns_embeddings, "lm_head.weight": config.owns_lm_head}
        case _:
            owned = {}
    return frozenset(name for name, is_own in owned.items() if not is_own)


def _dtype_of(head: Head) -> torch.dtype:
    """That of the head's own weights."""
    match head:
        case EagleHead() | Eagle3Head():
            return head.fc.weight.dtype
        case _:
            return next(head.parameters()).dtype
