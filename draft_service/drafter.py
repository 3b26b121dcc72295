"""The one interface of all drafters: "k tokens after this prefix", for a batch of sessions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specdec.sessions import ModelInfo, SessionSpec, SparseRow


class DraftState(Protocol):
    """What a drafter keeps of one session. Only its drafter changes it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        ...

    @property
    def num_pending(self) -> int:
        """Committed tokens the drafter has still to take in before it can draft."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that were found in a parked cache at opening."""
        ...


S = TypeVar("S", bound=DraftState)


@dataclass(frozen=True, slots=True)
class DraftJob(Generic[S]):
    """One session's part of a batch: take in some pending tokens, then draft if none is left."""

    state: S
    #: Pending tokens to take in now.
    num_rows: int
    #: Tokens to draft; 0 where pending tokens remain or only the prefix moves.
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafted tokens of one session; ``q_rows`` is empty or holds one row per token."""

    token_ids: tuple[int, ...] = ()
    q_rows: tuple[SparseRow, ...] = ()


class Drafter(Protocol[S]):
    """Proposes tokens for many sessions.

    Every method is called on the event loop, and none of them for a state that stands in a running :meth:`draft`.
    Rules of the house: losing a draft costs only speed, so at any limit a drafter drafts less instead of failing; and
    a drafted token never depends on the batch it was drafted in.
    """

    @property
    def info(self) -> ModelInfo:
        """The model behind it; ``method`` is set, ``vocab_size`` 0 where there is no model."""
        ...

    def open(self, spec: SessionSpec) -> S:
        """A state for ``spec.token_ids``, with all the memory it will ever need; nothing is computed yet.

        Raises:
            Overloaded: no memory at this moment.
            InvalidRequest: the parameters do not fit the model.
        """
        ...

    def advance(self, state: S, keep: int, token_ids: Sequence[int]) -> None:
        """The committed tokens are now the first ``keep`` known ones, then ``token_ids``. O(len(token_ids)) if all
        are kept.
        """
        ...

    def room(self, state: S) -> int:
        """How many tokens could be drafted after the committed ones; 0 and less at the context limit."""
        ...

    async def draft(self, batch: Sequence[DraftJob[S]]) -> list[Draft]:
        """Do every job (at least one, each of another state); one draft per job, empty where none was asked for.

        Runs to its end once begun. If it raises, no state has changed.
        """
        ...

    def close(self, state: S, park_as: str | None = None) -> None:
        """Free the memory of a state, once; with ``park_as``, keep it, evictable, under that key instead."""
        ...

    def occupancy(self) -> tuple[int, int, int]:
        """Blocks in use (open and parked), blocks in all, parked sessions."""
        ...

    async def shutdown(self) -> None:
        """Free everything; no state is open any more. Idempotent."""
        ...
