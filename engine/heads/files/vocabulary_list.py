"""The tokens that a draft may propose, as a file: for targets whose output layer is most of a draft's work."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from specdec.errors import InvalidRequest


def read_draft_vocabulary(path: str | Path, vocab_size: int) -> Tensor:
    """The ids in a file, a JSON list: int64 [Vd], ascending.

    Raises:
        InvalidRequest: it cannot be read, or is no list of two or more different ids below ``vocab_size``.
    """
    try:
        ids = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"draft_vocab {path} cannot be read: {error}", param="draft_vocab") from None
    is_list = isinstance(ids, list) and all(type(token_id) is int for token_id in ids)
    if not is_list or len(set(ids)) < max(2, len(ids)) or not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRequest(
            f"draft_vocab {path} is no JSON list of two or more different token ids below {vocab_size}",
            param="draft_vocab",
        )
    return torch.tensor(sorted(ids), dtype=torch.int64)
