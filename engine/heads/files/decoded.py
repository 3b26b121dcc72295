"""Heads whose linear layers are stored in a format of :mod:`engine.quantised`: read as models are, and decoded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint_files import CheckpointFiles
from engine.quantised.packed_integers import OF_LINEARS, REAL_DTYPES, parts_of, read_linear
from specdec.errors import ModelNotSupported

#: How formats name the tensor with the codes of a layer, beside "weight".
_CODES = (".weight_packed", ".qweight")


def weight_names(names: Iterable[str]) -> list[str]:
    """Names of tensors as if nothing were quantised: codes stand for their layer's ``weight``."""
    return [next((name.removesuffix(end) + ".weight" for end in _CODES if name.endswith(end)), name) for name in names]


def decode_linears(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A head's tensors, each quantised layer's as one ``weight`` [N, K] in the dtype of the folder's plain tensors.

    What ``config.json`` excludes from quantisation is stored plain, and stays as it is.

    Raises:
        ModelNotSupported: tensors of a layer are missing or do not fit together.
    """
    files = CheckpointFiles(folder, is_head=True)
    stored = files.stored_format
    if stored is None:
        return tensors
    plain = dict(tensors)
    dtype = _dtype(files, tensors)
    for prefix, parts in parts_of(tensors).items():
        if stored.marker not in parts or tensors[f"{prefix}.{stored.marker}"].dtype in REAL_DTYPES:
            continue
        try:
            weight = read_linear(stored, {part: tensors[f"{prefix}.{part}"] for part in parts})
        except (KeyError, RuntimeError, ValueError) as error:
            raise ModelNotSupported(
                f"{prefix} in {folder} cannot be read as {stored.method}: {error}; take the head that is not quantised"
            ) from None
        for part in OF_LINEARS.intersection(parts):
            del plain[f"{prefix}.{part}"]
        plain[f"{prefix}.weight"] = weight.decode().to(dtype)
    return plain


def _dtype(files: CheckpointFiles, tensors: dict[str, Tensor]) -> torch.dtype:
    """The dtype that ``config.json`` names, else that of the plain tensors, else bfloat16."""
    named = files.config.get("dtype") or files.config.get("torch_dtype")
    own = (tensor.dtype for name, tensor in tensors.items() if name.rpartition(".")[2] not in OF_LINEARS - {"weight"})
    found = [getattr(torch, str(named).removeprefix("torch."), None), *own]
    return next((dtype for dtype in found if dtype in REAL_DTYPES), torch.bfloat16)
