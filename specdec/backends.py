"""The interfaces of targets and drafts that the gateway uses.

The cores of the services implement them in one process; the gateway's gRPC clients implement them over the wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol, runtime_checkable

from specdec.direct_draft import DirectDraftSession
from specdec.types import (
    DraftOpened,
    DraftOpening,
    HiddenStates,
    ModelInfo,
    Proposal,
    ServerLoad,
    SessionSpec,
    TargetOpened,
    Verdict,
)
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1.types_pb2 import StateMapPart


class TargetSession(Protocol):
    """An open session on a target: requests in, verdicts out, both in order."""

    @property
    def opened(self) -> TargetOpened:
        """The result of admission and prefilling."""
        ...

    @property
    def first(self) -> Verdict:
        """The verdict of prefilling: the first token."""
        ...

    def offer(self, proposal: Proposal) -> None:
        """Ask for a round: verify the proposal (one without tokens is a plain step). The target waits for what follows.

        The round starts at once if the proposal continues the committed tokens. At most one round runs at a time.

        While multi-step decode continues, ``base_len`` is a length that a verdict has named. What was committed since
        is cut off the proposal, and the rest takes the place of the next tokens. Where other tokens were committed or
        nothing is left, the proposal is dropped.
        """
        ...

    def multi_step_decode(self, committed_len: int, num_tokens: int) -> None:
        """Ask for up to ``num_tokens`` tokens after ``committed_len`` without proposals. With 0 multi-step decode ends
        with its next token.

        ``committed_len`` is that of a verdict received, and all verdicts after it came from multi-step decode.
        """
        ...

    async def receive(self) -> Verdict:
        """The next verdict; steps of multi-step decode may be joined into one verdict.

        Raises a :class:`~specdec.errors.TandemError` when the session is lost: :class:`InvalidRequest` for a proposal
        that cannot be verified.
        """
        ...

    async def close(self) -> None:
        """Release the cache. Idempotent; never raises for a peer that is gone."""
        ...


class RelayedDraft(Protocol):
    """A session of a draft that the target asks through the gateway."""

    def post(self, request: pb.DraftRequest) -> None:
        """Pass on what the target asks."""
        ...

    def note(self, verdict: Verdict) -> None:
        """The target verified some of its tokens, or none."""
        ...

    def close(self) -> None:
        """The session is over. Idempotent."""
        ...


@runtime_checkable
class DraftRelay(Protocol):
    """A draft that only the gateway reaches."""

    def open_relayed(self, answer: Callable[[pb.RelayedResponse], None]) -> RelayedDraft:
        """Begin a session; ``answer`` gets what the draft says, the end of the session included."""
        ...


@runtime_checkable
class DraftOpener(Protocol):
    """A target session that can ask a draft for proposals itself."""

    @property
    def draft(self) -> DirectDraftSession | None:
        """The latest draft; at first that which the session's spec names, open or not."""
        ...

    async def open_draft(self, opening: DraftOpening, relay: DraftRelay | None = None) -> DirectDraftSession:
        """Open a session on a draft, which may be behind ``relay``, with the tokens that are committed on the target by
        then. The target's verdicts must be received meanwhile.

        Raises:
            TandemError: the draft cannot be opened.
        """
        ...


class TargetBackend(Protocol):
    """A target, on which sessions are opened."""

    async def open(self, spec: SessionSpec) -> TargetSession:
        """Admit and prefill; returns when the first token is known. Cancelling frees everything."""
        ...

    async def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        ...


@runtime_checkable
class StateMapTaker(Protocol):
    """A target that evaluates first layers of heads which it does not find itself."""

    async def put_state_map(self, parts: AsyncIterator[StateMapPart]) -> None:
        """Take one; it has it already where another call brought it meanwhile.

        Raises:
            Overloaded: there is no memory for it.
            InvalidRequest: it is damaged, or does not fit the model.
        """
        ...


@runtime_checkable
class StateMapSource(Protocol):
    """A draft that hands out its head's first layer."""

    def state_map(self, fingerprint: str) -> AsyncIterator[StateMapPart]:
        """Its parts.

        Raises:
            NotFound: it has no such one.
        """
        ...


class DraftSession(Protocol):
    """An open session on a draft: committed tokens in, proposals out, both in order.

    Every :meth:`advance` that asks for tokens is answered by a proposal that continues the tokens it commits, unless a
    newer call replaced it.
    """

    @property
    def opened(self) -> DraftOpened:
        """The result of admission."""
        ...

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        hidden_states: Sequence[HiddenStates] = (),
        stream_tokens: int = 0,
    ) -> None:
        """Commit ``token_ids`` after ``base_len`` and ask for ``num_draft_tokens`` after them.

        With ``num_draft_tokens`` 0 there is no answer. ``hidden_states`` are those of the target's verdicts since the
        last call, for drafters that read them. The call does not wait for the answer.

        With ``stream_tokens``, where :attr:`opened` says that the draft streams, it drafts on after its proposal as if
        that were committed, up to so many tokens after those that are, in proposals of ``num_draft_tokens``. Calls that
        agree with what was drafted do not interrupt it; after others it begins a new chain (``Proposal.chain``).
        """
        ...

    async def receive(self) -> Proposal:
        """The next proposal. It may have fewer tokens than asked for, even none.

        Raises a :class:`~specdec.errors.TandemError` when the session is lost.
        """
        ...

    async def close(self) -> None:
        """Release the cache. Idempotent; never raises for a peer that is gone."""
        ...


class DraftBackend(Protocol):
    """A draft, on which sessions are opened."""

    async def open(self, spec: SessionSpec) -> DraftSession:
        """Admit and prefill. Cancelling frees everything."""
        ...

    async def info(self) -> ModelInfo:
        """Describe the model."""
        ...

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        ...
