"""The checkpoints on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.checkpoint_config import read_config
from specdec.errors import InvalidRequest
from tandem.checkpoints import MODELS, OLDER_WEIGHTS, bundled_models


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A folder that a command can load."""

    #: What to give as MODEL.
    name: str
    #: "bundled", "hub cache" or "folder".
    place: str
    #: Of config.json, such as "LlamaForCausalLM"; empty where it names none.
    architecture: str
    #: Of the files of weights.
    num_bytes: int


def known_checkpoints(folders: Iterable[Path]) -> list[KnownCheckpoint]:
    """The bundled models, those in the Hugging Face hub's cache, and ``folders`` and the folders in them."""
    found = [_checkpoint(name, "bundled", MODELS / name) for name in bundled_models()]
    found += (_checkpoint(name, "hub cache", folder) for name, folder in _cached())
    for folder in folders:
        found += (_checkpoint(str(path), "folder", path) for path in (folder, *_inner(folder)) if _is_checkpoint(path))
    return found


def _inner(folder: Path) -> list[Path]:
    """The folders in it; none where it cannot be listed."""
    try:
        return sorted(path for path in folder.iterdir() if os.path.isdir(path))
    except OSError:
        return []


def _cached() -> Iterator[tuple[str, Path]]:
    """Names and newest snapshots of the models in the hub's cache."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # noqa: PLC0415 (slow to import)

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda each: each.last_modified)
        if _is_checkpoint(newest.snapshot_path):
            yield repository.repo_id, newest.snapshot_path


def _is_checkpoint(folder: Path) -> bool:
    # Path.is_file raises where the folder cannot be read.
    return os.path.isfile(folder / "config.json")


def _checkpoint(name: str, place: str, folder: Path) -> KnownCheckpoint:
    architectures = _config(folder).get("architectures") or [""]
    weights = {path for pattern in ("*.safetensors", *OLDER_WEIGHTS) for path in folder.glob(pattern)}
    return KnownCheckpoint(name, place, str(architectures[0]), sum(path.stat().st_size for path in weights))


def _config(folder: Path) -> dict[str, Any]:
    """What config.json holds; a broken one is reported where the checkpoint is loaded."""
    try:
        return read_config(folder)
    except InvalidRequest:
        return {}
