"""Heads from the folders they are published in, and back."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.heads.files.decoded import decode_linears
from engine.heads.files.head_format import HeadFormat
from engine.heads.files.packed_state_map import pack_state_map
from engine.heads.files.tensors import TargetTensors
from engine.heads.head import DraftHead
from engine.refused_checkpoints import check_checkpoint
from engine.state_map import StateMap
from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest
from specdec.methods import METHODS, method_of


def head_format(method: str) -> HeadFormat[Any]:
    """The files of a kind of head: ``FORMAT`` of the module beside this one that has the method's name."""
    found: HeadFormat[Any] = import_module(f"engine.heads.files.{method}").FORMAT
    return found


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
    head = _head_of(Path(folder), Path(target_folder), method or method_of(str(folder)))
    if (states := head.state_map) is not None:
        head.state_map_fingerprint = states.fingerprint()
    return head.to(device=device, dtype=dtype or head.dtype).eval().requires_grad_(False)


def _head_of(folder: Path, target_folder: Path, method: str) -> DraftHead:
    """As its files have it."""
    check_checkpoint(folder, is_head=True)
    config, target = read_config(folder), TargetTensors(target_folder)
    if not METHODS[method].is_head:
        raise InvalidRequest(f"{folder} holds no draft head but a {method}", param="model")
    form = head_format(method)
    tensors = decode_linears(folder, form.read_tensors(folder))
    head: DraftHead = form.read(folder, config, tensors, target)
    return head


def read_packed_state_map(folder: str, target_folder: str, method: str) -> bytes:
    """The first layer of a head that has one, see :func:`pack_state_map`. Raises like :func:`read_head`."""
    states = _head_of(Path(folder), Path(target_folder), method).state_map
    assert states is not None
    return pack_state_map(states)


def read_state_map(folder: str | Path, target_folder: str | Path, device: torch.device) -> tuple[str, StateMap] | None:
    """The fingerprint and the :class:`StateMap` of the head in ``folder``; None where it has none. Raises like
    :func:`read_head`, and :class:`InvalidRequest` where the device has no memory for it.
    """
    head = read_head(folder, target_folder)
    if (states := head.state_map) is None:
        return None
    try:
        return head.state_map_fingerprint, states.to(device)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            f"there is no memory on {device} for the first layer of {folder}: lower gpu_memory_utilization, or leave"
            f" it out of hidden_state_maps ({error})",
            param="hidden_state_maps",
        ) from error


def write_head(head: DraftHead, folder: str | Path) -> None:
    """Write a head as published: ``config.json`` and one safetensors file, without what it shares with its target."""
    folder, form = Path(folder), head_format(head.method)
    assert form.config_of is not None, f"{head.method} heads are not written"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in form.tensors_of(head).items()}
    save_file(tensors, folder / form.file)
    dtype = str(head.dtype).removeprefix("torch.")
    text = json.dumps({**form.config_of(head), "torch_dtype": dtype}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
