"""``config.json`` of a checkpoint, as it stands in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.errors import InvalidRequest


def read_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of the checkpoint in a folder.

    Raises:
        InvalidRequest: it is missing, cannot be read, or is no JSON object.
    """
    path = Path(folder, "config.json")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidRequest(
            f"{folder} has no config.json; give the folder of a checkpoint in Hugging Face format", param="model"
        ) from None
    except (OSError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} is no JSON object", param="model")
    return value


def read_text_config(folder: str | Path) -> dict[str, Any]:
    """The language model's part of ``config.json``; raises like :func:`read_config`."""
    config = read_config(folder)
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config
