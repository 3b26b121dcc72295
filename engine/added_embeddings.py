"""Something to add to the embeddings of a pass: what a model reads beside its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


class AddedEmbeddings:
    """Hangs on the embedding of a model whose own modules run the passes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._rows: torch.Tensor | None = None
        model.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def adding(self, rows: torch.Tensor) -> Iterator[None]:
        """Add ``rows`` [T, H] to the embeddings of the passes within."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _add(self, _: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded if self._rows is None else embedded + self._rows.to(embedded)
