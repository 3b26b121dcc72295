"""What all decoding loops of a gateway share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.pacing.controller import AdaptivePace, FixedPace, Pace
from gateway.pacing.target_pacer import TargetPacer
from gateway.routing import Replica, Router
from specdec.backends import TargetBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSettings:
    """What is the same for every request."""

    draft_timeout_s: float = 1.0
    max_target_retries: int = 3
    #: Proposals the draft may send ahead of each verdict; 0 drafts only after a verdict.
    num_ahead_proposals: int = 0
    #: Those that are at least this likely to be needed go to the target before the verdict is known.
    min_offer_likelihood: float = 0.3
    #: No drafting while more sequences than this are open; None always drafts.
    disable_by_batch_size: int | None = None
    #: Every round asks for all the drafted tokens it may; otherwise for as many as pay off.
    fixed_draft_length: bool = False


class DecodingContext:
    """The targets and drafts, how many decoding loops are open on them, and what these learned."""

    def __init__(self, router: Router, settings: DecodingSettings | None = None) -> None:
        self.router = router
        self.settings = settings or DecodingSettings()
        self.open_sessions = 0
        self._lanes: dict[Replica[TargetBackend], TargetPacer] = {}
        #: Closings that outlive their caller (a cancelled one); kept so that they are not collected.
        self.closings: set[asyncio.Task[None]] = set()

    @property
    def crowded(self) -> bool:
        """Whether so many sequences are open that drafting would slow them down."""
        limit = self.settings.disable_by_batch_size
        return limit is not None and self.open_sessions > limit

    def pace(self, replica: Replica[TargetBackend], limit: int) -> Pace:
        """What decides the number of drafted tokens of one session on a target, ``limit`` at most."""
        if self.settings.fixed_draft_length:
            return FixedPace(limit)
        return AdaptivePace(self._lanes.setdefault(replica, TargetPacer()), limit)

    @property
    def lanes(self) -> dict[str, TargetPacer]:
        """What was learned of each target, by its name."""
        return {replica.name: lane for replica, lane in self._lanes.items()}
