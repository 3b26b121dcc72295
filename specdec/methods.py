"""Ways of drafting by their names, and which one a checkpoint is made for. Reads files, loads no weights."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from specdec.errors import InvalidRequest, ModelNotSupported

#: Small heads on the target's hidden states: each comes as a checkpoint, and reads a few tensors of the target's.
HEAD_METHODS: Final = ("eagle", "eagle3", "medusa", "mlp_speculator")
#: Those that need a checkpoint.
MODEL_METHODS: Final = ("draft_model", *HEAD_METHODS)
#: Those that look up what stood in some text before.
LOOKUP_METHODS: Final = ("ngram", "suffix")
METHODS: Final = (*MODEL_METHODS, *LOOKUP_METHODS, "none")
#: ``speculators_model_type`` of the speculators library → method.
_SPECULATORS: Final[Mapping[str, str]] = {"eagle": "eagle", "eagle3": "eagle3", "mlp": "mlp_speculator"}
#: A tensor that only a head of this kind has: its name, and the method.
_TENSORS: Final[Mapping[str, str]] = {"hidden_norm.weight": "eagle3", "fc.weight": "eagle"}


def method_of(folder: str) -> str:
    """The method that the checkpoint in ``folder`` is made for; "draft_model" for any other causal language model.

    A folder without a readable ``config.json`` counts as such a model: whoever loads it says what is wrong.

    Raises:
        ModelNotSupported: the config names a kind of drafter that is not known here.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError):
        return "draft_model"
    return method_of_config(config) or _method_of_tensors(Path(folder), config) or "draft_model"


def method_of_config(config: Mapping[str, Any]) -> str | None:
    """What a ``config.json`` says by itself; None where it may be any causal language model's."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in _SPECULATORS:
            raise ModelNotSupported(
                f"speculators_model_type is {kind!r}; of the speculators format {', '.join(_SPECULATORS)} are known"
            )
        return _SPECULATORS[kind]
    names = [str(name).lower() for name in (*(config.get("architectures") or ()), config.get("model_type", ""))]
    if "medusa_num_heads" in config or any("medusa" in name for name in names):
        return "medusa"
    if any(name.startswith(("mlp_speculator", "mlpspeculator")) for name in names):
        return "mlp_speculator"
    if any("eagle3" in name for name in names) or "eagle_config" in config:
        return "eagle3"
    if any("eagle" in name for name in names):
        return "eagle"
    if any(name.endswith(("_mtp", "mtpmodel")) for name in names):
        refuse_mtp()
    return None


def refuse_mtp() -> None:
    """Raise what there is to say about ``mtp``."""
    raise InvalidRequest(
        'method "mtp" (prediction layers inside the target\'s own checkpoint) is not available: use "eagle3" with a'
        ' head that was trained for the target, or "suffix", which needs none',
        param="method",
    )


def _method_of_tensors(folder: Path, config: Mapping[str, Any]) -> str | None:
    """EAGLE's own files carry the config of a Llama of one layer; the names of their tensors tell."""
    if config.get("num_hidden_layers") != 1:
        return None
    names = _tensor_names(folder)
    return next((method for tensor, method in _TENSORS.items() if tensor.encode() in names), None)


def _tensor_names(folder: Path) -> bytes:
    """Bytes that the names of the checkpoint's tensors stand in: a safetensors header, or the pickle, never run."""
    names = b""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            names += file.read(int.from_bytes(file.read(8), "little"))
    for path in sorted(folder.glob("*.bin")):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names += b"".join(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    return names
