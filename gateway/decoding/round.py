"""One round of a request: the proposal that the target was asked to verify, and what was asked for with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from specdec.types import Proposal, Verdict


class Origin(StrEnum):
    """Where a token of the text came from."""

    #: The draft proposed it and the target accepted it.
    DRAFT = "draft"
    #: The gateway looked it up and the target accepted it.
    LOOKUP = "lookup"
    #: The target's own: without a proposal, or after it accepted a whole one.
    TARGET = "target"
    #: The target's own, in place of a drafted token that it rejected.
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """A proposal that the target verifies."""

    proposal: Proposal
    #: Drafted tokens asked for; a proposal may have fewer.
    num_asked: int
    #: Whether the gateway looked the tokens up; else a draft service drafted them.
    is_looked_up: bool = False
    #: Whether they are of the client's prediction.
    is_predicted: bool = False
    #: When the round was asked for, or the verdict came that started a proposal which the target held already.
    asked_ns: int = field(default_factory=time.perf_counter_ns)
    #: How long there was a verdict but no proposal.
    wait_ns: int = 0

    def after(self, token_ids: tuple[int, ...]) -> Self | None:
        """What is left of the round once these tokens are committed; None: nothing."""
        proposal = self.proposal.after(token_ids)
        if proposal is None or not proposal.token_ids:
            return None
        return replace(self, proposal=proposal, num_asked=self.num_asked - len(token_ids))

    def num_tried(self, verdict: Verdict) -> int:
        """Drafted tokens that were asked for, less those that the target cut off: these say nothing of acceptance."""
        is_cut = verdict.num_draft_tokens < len(self.proposal.token_ids)
        return verdict.num_draft_tokens if is_cut else max(self.num_asked, verdict.num_draft_tokens)

    def tree_depth(self, verdict: Verdict) -> int | None:
        """Levels of the verified tree; None for a chain."""
        if not self.proposal.parents or not verdict.num_draft_tokens:
            return None
        return self.proposal.cut(verdict.num_draft_tokens).depth

    def origins(self, verdict: Verdict) -> tuple[Origin, ...]:
        """Where each token of its verdict came from."""
        accepted = Origin.LOOKUP if self.is_looked_up else Origin.DRAFT
        most = self.tree_depth(verdict) or verdict.num_draft_tokens
        own = Origin.REJECTION if verdict.num_accepted < most else Origin.TARGET
        return tuple(accepted if i < verdict.num_accepted else own for i in range(len(verdict.token_ids)))
