"""One round of a request: what was drafted, by whom, and what was asked for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Self

from specdec.types import DraftedRound, Proposal, RoundTimings, Verdict


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


class AskedRound(ABC):
    """A round of drafted tokens, and what was asked for with it."""

    __slots__ = ()

    #: Drafted tokens asked for; a proposal may have fewer.
    num_asked: int
    #: Whether the gateway looked the tokens up; else a draft service drafted them.
    is_looked_up: bool
    #: Whether they are of the client's prediction.
    is_predicted: bool
    #: When the round was asked for.
    asked_ns: int
    #: How long there was a verdict but no proposal.
    wait_ns: int

    @property
    def is_stream(self) -> bool:
        """Whether it is a step beside a stream."""
        return False

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of its proposal."""

    @property
    @abstractmethod
    def draft_ns(self) -> int:
        """How long the draft computed."""

    @abstractmethod
    def tree_depth(self, verdict: Verdict) -> int | None:
        """Levels of the verified tree; None for a chain."""

    def whole_depth(self, verdict: Verdict) -> int | None:
        """Levels of a round that is drafted whole or not at all, for pacing: of a tree; None for other rounds."""
        return self.tree_depth(verdict)

    def num_tried(self, verdict: Verdict) -> int:
        """Drafted tokens that were asked for, less those that the target cut off: these say nothing of acceptance."""
        is_cut = verdict.num_draft_tokens < self.num_tokens
        return verdict.num_draft_tokens if is_cut else max(self.num_asked, verdict.num_draft_tokens)

    def origins(self, verdict: Verdict) -> tuple[Origin, ...]:
        """Where each token of its verdict came from."""
        accepted = Origin.LOOKUP if self.is_looked_up else Origin.DRAFT
        most = self.tree_depth(verdict) or verdict.num_draft_tokens
        own = Origin.REJECTION if verdict.num_accepted < most else Origin.TARGET
        return tuple(accepted if i < verdict.num_accepted else own for i in range(len(verdict.token_ids)))


@dataclass(frozen=True, slots=True)
class RoundRequest(AskedRound):
    """A proposal that the target is asked to verify."""

    proposal: Proposal
    num_asked: int
    is_looked_up: bool = False
    is_predicted: bool = False
    asked_ns: int = field(default_factory=time.perf_counter_ns)
    wait_ns: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the proposal."""
        return len(self.proposal.token_ids)

    @property
    def draft_ns(self) -> int:
        """How long the draft computed."""
        return self.proposal.draft_ns

    def after(self, token_ids: tuple[int, ...]) -> Self | None:
        """What is left of the round once these tokens are committed; None: nothing."""
        proposal = self.proposal.after(token_ids)
        if proposal is None or not proposal.token_ids:
            return None
        return replace(self, proposal=proposal, num_asked=self.num_asked - len(token_ids))

    def tree_depth(self, verdict: Verdict) -> int | None:
        """Levels of the verified tree; None for a chain."""
        if not self.proposal.parents or not verdict.num_draft_tokens:
            return None
        return self.proposal.cut(verdict.num_draft_tokens).depth


@dataclass(frozen=True, slots=True)
class DirectRound(AskedRound):
    """A round whose proposal the target asked the draft for."""

    drafted: DraftedRound
    num_asked: int
    asked_ns: int
    wait_ns: int
    is_looked_up: bool = False
    is_predicted: bool = False

    @classmethod
    def of(cls, drafted: DraftedRound, timings: RoundTimings, verdict_ns: int) -> Self:
        """What the target says of a round whose verdict came at ``verdict_ns``; the message's way is not counted."""
        took_ns = timings.queue_ns + timings.forward_ns + timings.verify_ns
        return cls(drafted, drafted.num_asked, verdict_ns - took_ns, drafted.wait_ns)

    @property
    def is_stream(self) -> bool:
        """Whether it is a step beside a stream."""
        return self.drafted.is_stream

    @property
    def num_tokens(self) -> int:
        """Tokens of the proposal."""
        return self.drafted.num_tokens

    @property
    def draft_ns(self) -> int:
        """How long the draft computed."""
        return self.drafted.draft_ns

    def tree_depth(self, verdict: Verdict) -> int | None:
        """Levels of the verified tree; None for a chain."""
        return self.drafted.depth if self.drafted.depth and verdict.num_draft_tokens else None

    def whole_depth(self, verdict: Verdict) -> int | None:
        """The same, and of each step beside a stream: it verifies all that is there."""
        return self.num_asked if self.drafted.is_stream else self.tree_depth(verdict)
