"""What all decoding loops of a gateway share."""

from __future__ import annotations

import asyncio

from gateway.pacing.controller import AdaptivePace, FixedPace, Pace
from gateway.pacing.target_pacer import TargetPacer
from gateway.routing import Replica, Router
from specdec.backends import TargetBackend
from specdec.settings import GatewaySettings


class DecodingContext:
    """The targets and drafts, how many decoding loops are open on them, and what these learned."""

    def __init__(self, router: Router, settings: GatewaySettings | None = None) -> None:
        self.router = router
        self.settings = settings or GatewaySettings()
        self.open_sessions = 0
        self._pacers: dict[Replica[TargetBackend], TargetPacer] = {}
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
        return AdaptivePace(self._pacers.setdefault(replica, TargetPacer()), limit)

    @property
    def pacers(self) -> dict[str, TargetPacer]:
        """What was learned of each target, by its name."""
        return {replica.name: pacer for replica, pacer in self._pacers.items()}
