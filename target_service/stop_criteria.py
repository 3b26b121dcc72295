"""Where a sequence ends: stop tokens and length limits, applied to what a round would commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types import FinishReason


@dataclass(frozen=True, slots=True)
class Truncation:
    """The tokens a round really commits, and why it is the last one if it is."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """The limits of one sequence."""

    prompt_len: int
    #: Longest sequence, prompt and output together: max_tokens and the model's context, whichever is shorter.
    max_len: int
    stop_token_ids: frozenset[int] = frozenset()
    #: Stop tokens do not end the sequence before this many tokens were generated.
    min_tokens: int = 0

    def room(self, committed_len: int) -> int:
        """Tokens that may still be committed."""
        return self.max_len - committed_len

    def cut(self, committed_len: int, token_ids: Sequence[int]) -> Truncation:
        """Cut what follows ``committed_len`` after the first stop token, or at the limit; a stop token wins a tie."""
        first_stop = self.prompt_len + self.min_tokens
        room = self.room(committed_len)
        for index, token_id in enumerate(token_ids[:room]):
            if token_id in self.stop_token_ids and committed_len + index >= first_stop:
                return Truncation(tuple(token_ids[: index + 1]), FinishReason.STOP, token_id)
        return Truncation(tuple(token_ids[:room]), FinishReason.LENGTH if len(token_ids) >= room else None)
