"""No drafting: every proposal is empty. For measuring what the split costs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import Draft, DraftJob
from specdec import __version__
from specdec.types import HiddenStates, ModelInfo, SessionSpec


@dataclass(slots=True, eq=False)
class Tokens:
    """The committed tokens of one session and nothing else."""

    token_ids: list[int]
    num_pending: int = 0
    num_cached_tokens: int = 0


class NoDrafter:
    """A drafter that never has anything to say."""

    def __init__(self) -> None:
        self.info = ModelInfo(name="none", architecture="none", method="none", version=__version__)

    def open(self, spec: SessionSpec) -> Tokens:
        """Remember the tokens."""
        return Tokens(list(spec.token_ids))

    def advance(
        self, state: Tokens, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Remember the tokens."""
        state.token_ids[keep:] = token_ids

    def room(self, state: Tokens) -> int:
        """Nothing is ever drafted."""
        return 0

    async def draft(self, batch: Sequence[DraftJob[Tokens]]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in batch]

    def draft_now(self, batch: Sequence[DraftJob[Tokens]]) -> list[Draft]:
        """The same."""
        return [Draft() for _ in batch]

    def drop_ahead(self, state: Tokens) -> None:
        """There is nothing ahead."""

    def close(self, state: Tokens, park_as: str | None = None) -> None:
        """There is nothing to free and nothing worth keeping."""

    def occupancy(self) -> tuple[int, int, int]:
        """No blocks."""
        return 0, 0, 0

    async def shutdown(self) -> None:
        """There is nothing to free."""
