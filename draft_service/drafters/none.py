"""No drafting: every proposal is empty. For measuring what the split costs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import Draft, Drafter, DraftJob
from specdec import __version__
from specdec.types import HiddenStates, ModelInfo, SessionSpec


@dataclass(slots=True, eq=False)
class CommittedTokens:
    """The committed tokens of one session and nothing else."""

    token_ids: list[int]
    num_pending: int = 0


class NoDrafter(Drafter[CommittedTokens]):
    """A drafter whose proposals are empty."""

    def __init__(self) -> None:
        self.info = ModelInfo(name="none", architecture="none", method="none", version=__version__)

    def open(self, spec: SessionSpec) -> CommittedTokens:
        """Keep the tokens."""
        return CommittedTokens(list(spec.token_ids))

    def advance(
        self, state: CommittedTokens, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """Keep the tokens."""
        state.token_ids[keep:] = token_ids

    def room(self, state: CommittedTokens) -> int:
        """Nothing is ever drafted."""
        return 0

    async def draft(self, batch: Sequence[DraftJob[CommittedTokens]]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in batch]
