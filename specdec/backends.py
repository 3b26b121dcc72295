"""What the gateway needs of a target and of a draft: sessions that are opened, asked and closed.

The cores of the services implement these interfaces in one process; the gateway's gRPC clients implement them over the
wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specdec.types import (
    DraftOpened,
    HiddenStates,
    ModelInfo,
    Proposal,
    ServerLoad,
    SessionSpec,
    TargetOpened,
    Verdict,
)


class TargetSession(Protocol):
    """An open session on a target: what is asked for, and the verdicts that come of it, in order."""

    @property
    def opened(self) -> TargetOpened:
        """What admission and prefilling found."""
        ...

    @property
    def first(self) -> Verdict:
        """The verdict of prefilling: the first token."""
        ...

    def offer(self, proposal: Proposal) -> None:
        """Ask for a round: verify the proposal (one without tokens is a plain step).

        It starts at once where the proposal continues what is committed. One that assumes more is kept, and starts as
        soon as those tokens are committed; where others are, it is dropped. So at most one round is under way, and a
        verdict alone tells whether an offer made before starts the next one. No more may be kept than
        :class:`~specdec.pending_proposals.PendingProposals` holds.
        """
        ...

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Ask for up to ``num_tokens`` tokens after ``committed_len`` without proposals; withdraws all offers.

        ``committed_len`` is that of a verdict received, and everything after it came of multi-step decode, too.
        """
        ...

    async def receive(self) -> Verdict:
        """The next verdict of what was asked for; steps of multi-step decode may be joined into one verdict.

        Raises a :class:`~specdec.errors.TandemError` when the session is lost: :class:`InvalidRequest` for a proposal
        that cannot be verified.
        """
        ...

    async def close(self) -> None:
        """Release (or park) the cache. Idempotent; never raises for a peer that is gone."""
        ...


class TargetBackend(Protocol):
    """Where target sessions are opened."""

    async def open(self, spec: SessionSpec) -> TargetSession:
        """Admit and prefill; returns once the first token is there. Cancelling leaves nothing behind."""
        ...

    async def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        ...


class DraftSession(Protocol):
    """An open session on a draft: one side commits tokens, the other receives proposals, each in order.

    Every :meth:`advance` that asks for tokens is answered by a proposal that continues the tokens committed by it,
    unless a newer one overtook it. With ``num_ahead_proposals`` the draft also guesses the coming verdict and sends
    proposals for the likeliest ones before they are asked for. Where one of them was sent for exactly the tokens that
    an advance commits, it *is* the answer and no other comes. So who asked takes the first proposal that fits the
    committed tokens, and drops those that cannot fit any more.
    """

    @property
    def opened(self) -> DraftOpened:
        """What admission found."""
        ...

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        num_ahead_proposals: int = 0,
        hidden_states: Sequence[HiddenStates] = (),
    ) -> None:
        """Commit ``token_ids`` after ``base_len`` and ask for ``num_draft_tokens`` after them.

        Up to ``num_ahead_proposals`` may be drafted ahead of the next verdict. With ``num_draft_tokens`` 0 there is no
        answer and drafting ahead ends. ``hidden_states``: what the target's verdicts carried since the last call, for
        drafters that read them. Does not wait for the answer.
        """
        ...

    async def receive(self) -> Proposal:
        """The next proposal: an answer, which may be shorter than asked for, even empty, or one drafted ahead.

        Raises a :class:`~specdec.errors.TandemError` when the session is lost.
        """
        ...

    async def close(self) -> None:
        """Release (or park) the cache. Idempotent; never raises for a peer that is gone."""
        ...


class DraftBackend(Protocol):
    """Where draft sessions are opened."""

    async def open(self, spec: SessionSpec) -> DraftSession:
        """Admit and prefill. Cancelling leaves nothing behind."""
        ...

    async def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        ...
