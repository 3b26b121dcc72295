"""Which committed tokens a draft reads of a long text: the first ones and the last ones.

The first tokens stay because attention needs them whatever they are (attention sinks: Xiao et al. 2023, arXiv
2309.17453). What a draft does not read changes what it drafts, never the text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from draft_service.drafters.base import UNLIMITED
from specdec.settings import DraftSettings, ModelSettings
from specdec.settings.option import require
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)

#: The field of a checkpoint's ``config.json`` with the longest text that it is to read.
FIELD: Final = "draft_window_size"


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The tokens a draft reads: a function of the text's length alone.

    A text of at most ``size`` tokens is read whole. Of a longer one the first ``num_sinks`` tokens are read and the
    last ones, at most ``size`` together. The tokens between are skipped, ``step`` at a time: what is skipped changes
    once in ``step`` tokens.
    """

    size: int = UNLIMITED
    num_sinks: int = 0
    step: int = UNLIMITED

    @classmethod
    def of(cls, settings: DraftSettings, info: ModelInfo, multiple: int = 1) -> Self:
        """The window of the settings, else of the draft's checkpoint, else all. ``multiple``: a divisor of
        ``num_sinks`` and ``step``.

        Raises:
            InvalidRequest: the draft has no room for the window of the settings and a proposal, or the window is too
                small for the first tokens and one step.
        """
        size, num_sinks = settings.speculative.draft_window_size, settings.speculative.draft_sink_size
        num_sinks = -(-num_sinks // multiple) * multiple
        least = num_sinks + 2 * multiple
        most = min(info.max_model_len, info.kv_cache_tokens) - info.num_speculative_tokens
        limits = (
            f"from {least}, for {num_sinks} first tokens, to {most}, what the draft's context of {info.max_model_len}"
            f" tokens and its KV cache of {info.kv_cache_tokens} leave"
        )
        if size is None:
            size = _named_size(settings.model)
            if size and not (isinstance(size, int) and least <= size <= most):
                logger.warning("the checkpoint's %s of %r is not used; it must be %s", FIELD, size, limits)
                size = 0
        if not size:
            return cls()
        require(least <= size <= most, "draft_window_size", f"draft_window_size is {size}; it must be {limits}")
        return cls(size, num_sinks, (size - num_sinks) // 2 // multiple * multiple)

    def num_skipped(self, length: int) -> int:
        """Tokens after the first ``num_sinks`` that are not read, of a text of ``length`` tokens."""
        return 0 if length <= self.size else -(-(length - self.size) // self.step) * self.step

    def read(self, token_ids: Sequence[int], start: int = 0) -> Sequence[int]:
        """The tokens that are read of a text, without the first ``start`` of them."""
        num_skipped = self.num_skipped(len(token_ids))
        if not num_skipped or start >= self.num_sinks:
            return token_ids[start + num_skipped :]
        return [*token_ids[start : self.num_sinks], *token_ids[self.num_sinks + num_skipped :]]

    def longest_text(self, context: int) -> int:
        """The longest text after which a draft with this context drafts."""
        return context if self.size == UNLIMITED else UNLIMITED


def _named_size(model: ModelSettings | None) -> Any:
    """What a checkpoint names; nothing: None."""
    config = Path(model.model, "config.json") if model else None
    return json.loads(config.read_text(encoding="utf-8")).get(FIELD) if config and config.is_file() else None
