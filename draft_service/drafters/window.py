"""Which committed tokens a draft reads of a long text: the first ones and the last ones.

The first tokens stay because attention needs them whatever they are (attention sinks: Xiao et al. 2023, arXiv
2309.17453). What a draft does not read changes what it drafts, never the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from draft_service.drafters.base import UNLIMITED
from specdec.errors import InvalidRequest
from specdec.settings import SpeculativeSettings
from specdec.types import ModelInfo


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The tokens a draft reads: a function of the text's length alone.

    A text of at most ``size`` tokens is read whole. Of a longer one the first ``num_sinks`` tokens are read and the
    last ones, more than half of ``size`` and at most ``size`` together. The tokens between are skipped, ``step`` at a
    time: what is skipped changes once in ``step`` tokens.
    """

    size: int = UNLIMITED
    num_sinks: int = 0

    @classmethod
    def of(cls, settings: SpeculativeSettings) -> Self:
        """The window of the settings."""
        if settings.draft_window_size is None:
            return cls()
        return cls(settings.draft_window_size, settings.draft_sink_size)

    @property
    def step(self) -> int:
        """Tokens that are skipped at a time."""
        return (self.size - self.num_sinks) // 2

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

    def check(self, info: ModelInfo) -> None:
        """Raise :class:`InvalidRequest` if the draft has no room for the window and a proposal."""
        most = min(info.max_model_len, info.kv_cache_tokens) - info.num_speculative_tokens
        if UNLIMITED > self.size > most:
            raise InvalidRequest(
                f"draft_window_size is {self.size}; the draft's context of {info.max_model_len} tokens and its KV cache"
                f" of {info.kv_cache_tokens} have room for a window of {most} tokens at most",
                param="draft_window_size",
            )
