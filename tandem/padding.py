"""A target made costlier without changing one answer.

Layers are added whose ``o_proj`` and ``down_proj`` are zero, so they add nothing to the residual stream, and every MLP
is widened by units whose ``down_proj`` columns are zero. Logits and acceptance stay what they were; a forward pass
reads as many weights as a model of the wanted size. Wide MLPs instead of a hundred thin layers keep Python's share of
a layer realistic.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest, ModelNotSupported

#: Layers of the padded target of the documentation's tables.
NUM_LAYERS: Final = 12
_WIDTH_STEP: Final = 32
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_LAYER: Final = re.compile(r"^(?P<stem>.*\blayers\.)(?P<index>\d+)\.(?P<rest>.+)$")
_SILENCED: Final = ("o_proj.", "down_proj.")


def parse_size(text: str) -> int:
    """``200M`` → 200_000_000. Raises :class:`InvalidRequest` for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if match is None:
        raise InvalidRequest(f"size is {text!r}; write a number of parameters such as 200M or 1.5B", param="pad_target")
    return int(float(match[1]) * _UNITS[match[2]])


def pad_checkpoint(source: str, num_parameters: int, *, num_layers: int = NUM_LAYERS, cache: Path | None = None) -> str:
    """Write the checkpoint ``source`` padded to about ``num_parameters``; returns its folder.

    The result is kept under ``cache`` (default: the user's cache folder) and found there the next time.
    Raises :class:`ModelNotSupported` for layouts without separate gate, up and down projections.
    """
    folder = Path(source)
    weights = _read_weights(folder)
    config = read_config(folder)
    key = _fingerprint(folder, num_parameters, num_layers)
    result = (cache or cache_folder()) / "padded" / f"{folder.name}-{num_parameters / 1e6:g}M-{key}"
    if (result / "config.json").is_file():
        return str(result)
    width = _width_for(config, weights, num_parameters, num_layers)
    layers = max(num_layers, int(config["num_hidden_layers"]))
    tensors = dict(_pad(weights, config, layers, width))
    result.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=result.parent, prefix=".making-") as made:
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith("model"):
                shutil.copyfile(path, Path(made) / path.name)
        (Path(made) / "config.json").write_text(json.dumps(_padded_config(config, layers, width), indent=2))
        save_file(tensors, str(Path(made) / "model.safetensors"), metadata={"format": "pt"})
        if not result.exists():
            os.rename(made, result)
            os.mkdir(made)  # for TemporaryDirectory to remove
    return str(result)


def cache_folder() -> Path:
    """Where files that can be made again are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def _fingerprint(folder: Path, num_parameters: int, num_layers: int) -> str:
    digest = hashlib.sha256(f"1 {num_parameters} {num_layers}".encode())
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), "pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if not any(name.endswith("mlp.gate_proj.weight") for name in weights):
        raise ModelNotSupported(f"{folder} cannot be padded: its MLPs have no gate_proj, up_proj and down_proj")
    return weights


def _width_for(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], wanted: int, num_layers: int) -> int:
    """The MLP width that brings the padded model nearest to the wanted size."""
    layers = max(num_layers, int(config["num_hidden_layers"]))
    narrow = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    inside = sum(tensor.numel() for name, tensor in narrow.items() if _LAYER.match(name))
    outside = sum(tensor.numel() for tensor in narrow.values()) - inside
    rest = wanted - outside - inside * layers // int(config["num_hidden_layers"])
    exact = rest / (3 * int(config["hidden_size"]) * layers)
    width = round(exact / _WIDTH_STEP) * _WIDTH_STEP
    if width < int(config["intermediate_size"]):
        raise InvalidRequest(f"the target cannot be padded to {wanted:,} parameters: it is larger", param="pad_target")
    return width


def _pad(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], layers: int, width: int
) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    depth = int(config["num_hidden_layers"])
    scale = float(config.get("initializer_range", 0.02))
    for name, tensor in weights.items():
        layer = _LAYER.match(name)
        if layer is None:
            yield name, tensor
            continue
        for index in range(int(layer["index"]), layers, depth):
            new = index >= depth and any(mark in name for mark in _SILENCED)
            wide = _widen(name, torch.zeros_like(tensor) if new else tensor, width, scale, generator)
            yield f"{layer['stem']}{index}.{layer['rest']}", wide.clone(memory_format=torch.contiguous_format)


def _widen(name: str, tensor: torch.Tensor, width: int, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Gate and up get random rows (their cost is real), down gets zero columns (their effect is none)."""
    if "mlp.down_proj.weight" in name:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))
    if "mlp.gate_proj." in name or "mlp.up_proj." in name:
        shape = (width - tensor.shape[0], *tensor.shape[1:])
        return torch.cat([tensor, torch.randn(shape, generator=generator).mul_(scale).to(tensor.dtype)])
    return tensor


def _padded_config(config: Mapping[str, Any], layers: int, width: int) -> dict[str, Any]:
    padded = {**config, "num_hidden_layers": layers, "intermediate_size": width}
    if kinds := config.get("layer_types"):
        padded["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    return padded
