"""Worse drafts from a good one: the same model and cost, but its output layer names other tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from specdec.errors import ModelNotSupported

#: Name of a draft → standard deviation of the noise on its output rows, in those of the row; None shuffles the rows.
#: On the bundled pair, greedy: 0.81 of the tokens are right without noise, 0.48 with "fair", none with "bad".
DEGRADED: Final[Mapping[str, float | None]] = {"fair": 1.0, "bad": None}
_EMBEDDING: Final = "model.embed_tokens.weight"
_OUTPUT: Final = "lm_head.weight"


def degrade_checkpoint(source: Path, folder: Path, noise: float | None) -> None:
    """Write ``source`` to ``folder`` with an output layer of its own: rows with noise, or shuffled where it is None.

    Raises :class:`ModelNotSupported` for a layout without the usual names.
    """
    weights = {
        name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    output = weights.get(_OUTPUT, weights.get(_EMBEDDING))
    if output is None:
        raise ModelNotSupported(f"{source} cannot be degraded: it has neither {_OUTPUT} nor {_EMBEDDING}")
    generator = torch.Generator().manual_seed(0)
    if noise is None:
        rows = output[torch.randperm(len(output), generator=generator)]
    else:
        spread = output.float().std(1, keepdim=True)
        rows = output + (noise * spread * torch.randn(output.shape, generator=generator)).to(output.dtype)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("model"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file({**weights, _OUTPUT: rows.contiguous()}, folder / "model.safetensors", metadata={"format": "pt"})
