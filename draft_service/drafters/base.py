"""The one interface of all drafters: "k tokens after this prefix", for a batch of sessions at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from specdec.params import SamplingParams
from specdec.rules import DEFAULT_RULE, SparseRow, one_rule_per_sampling
from specdec.settings import DraftSettings
from specdec.tree_shape import TreeShape
from specdec.types import HiddenStates, ModelInfo, SessionSpec


class DraftState(Protocol):
    """What a drafter keeps of one session. Only its drafter changes it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        ...

    @property
    def num_pending(self) -> int:
        """Committed tokens the drafter has to ingest before it can draft. One that reads hidden states counts only
        those it can ingest: tokens whose states it was given.
        """
        ...


def warm_up_specs() -> list[SessionSpec]:
    """A session for every way that rules have a draft sample: drafted for once at the start, no client pays for the
    first time.
    """
    return [
        SessionSpec(
            session_id="warm-up",
            token_ids=(0,),
            prompt_len=1,
            params=SamplingParams(temperature=temperature, seed=0, max_tokens=4),
            rule=rule,
        )
        for temperature, rule in ((0.0, DEFAULT_RULE), *((1.0, rule) for rule in one_rule_per_sampling()))
    ]


S = TypeVar("S", bound=DraftState)


class Flags(Protocol):
    """One flag per job, which a running computation looks at."""

    def __setitem__(self, at: int, value: int, /) -> None:
        """Raise (1) or lower (0) one."""
        ...


class Stop:
    """A request to end one job while its batch runs."""

    __slots__ = ("_at", "_flags", "is_requested")

    def __init__(self) -> None:
        self.is_requested = False
        self._flags: Flags | None = None
        self._at = 0

    def bind(self, flags: Flags, at: int) -> None:
        """Name the flag that the computation looks at; called by the drafter."""
        self._flags, self._at = flags, at
        if self.is_requested:
            flags[at] = 1

    def request_stop(self) -> None:
        """Let the job end at its next step, with the tokens it has by then."""
        self.is_requested = True
        if self._flags is not None:
            self._flags[self._at] = 1


#: Tokens that a short batch ingests at most.
MAX_SHORT_ROWS: Final = 64
#: What :meth:`Drafter.room` returns without a limit.
UNLIMITED: Final = 2**31


@dataclass(frozen=True, slots=True)
class DraftJob(Generic[S]):
    """One session's part of a batch: ingest some pending tokens, then draft if none is left."""

    state: S
    #: Pending tokens to ingest now.
    num_rows: int
    #: Tokens to draft; 0 where pending tokens remain or only the prefix moves.
    num_tokens: int
    stop: Stop = field(default_factory=Stop)
    #: Draft a tree of this shape, of ``num_tokens`` tokens at most; None: a chain. A drafter that knows no trees drafts
    #: chains.
    tree: TreeShape | None = None
    #: It is one of a stream: another follows at once, so it must not hold up the event loop, which hears of verdicts.
    is_stream: bool = False

    @property
    def num_steps(self) -> int:
        """Passes that draft it, one after the other: levels of the tree, or tokens. The first ingests what is
        pending.
        """
        return self.tree.depth if self.tree else self.num_tokens


def num_short_steps(batch: Sequence[DraftJob[Any]], num_open: int) -> int:
    """Steps of a batch that may be run on the event loop, if they are short; 0: it must not.

    It holds a job of each of the ``num_open`` sessions, so that no other one could join, and has few rows; none is
    of a stream.
    """
    if len(batch) < num_open or sum(job.num_rows for job in batch) > MAX_SHORT_ROWS:
        return 0
    if not all(job.num_tokens and not job.is_stream for job in batch):
        return 0
    return max(job.num_steps for job in batch)


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafted tokens of one session; ``q_rows`` is empty or holds one row per group of siblings, in a chain per
    token.
    """

    token_ids: tuple[int, ...] = ()
    q_rows: tuple[SparseRow, ...] = ()
    #: Of a tree: the index of the token each one follows, which stands before it, or -1; empty: a chain. The best
    #: tokens come first, as later ones may be cut off.
    parents: tuple[int, ...] = ()


class Occupancy(NamedTuple):
    """Blocks of a drafter's KV cache."""

    used: int = 0
    #: Of no session, given up when others need them.
    cached: int = 0
    total: int = 0


class Drafter(ABC, Generic[S]):
    """Proposes tokens for many sessions.

    Every method is called on the event loop, and none of them for a state that a running :meth:`draft` uses. Losing a
    draft costs speed only, so at any limit a drafter drafts less instead of failing. A drafted token never depends on
    the batch it was drafted in.
    """

    #: The model behind it; ``method`` is set, ``vocab_size`` 0 without a model. A drafter that reads the target's
    #: hidden states names them in ``hidden_state_layers``.
    info: ModelInfo
    #: Whether its own drafts may stand for committed tokens for a while: taking them back costs little.
    streams: bool = False

    @classmethod
    async def load(cls, settings: DraftSettings) -> Self:
        """The drafter with these settings, loaded and warmed up.

        Raises:
            ModelNotSupported: the checkpoint cannot be run correctly.
            InvalidRequest: a setting does not fit the model or the machine.
        """
        return cls()

    @abstractmethod
    def open(self, spec: SessionSpec) -> S:
        """A state for ``spec.token_ids``, with memory for them; nothing is computed yet.

        Raises:
            Overloaded: no memory at this moment.
            InvalidRequest: the parameters do not fit the model.
        """

    @abstractmethod
    def advance(
        self, state: S, keep: int, token_ids: Sequence[int], hidden_states: Sequence[HiddenStates] = ()
    ) -> None:
        """The committed tokens are now the first ``keep`` known ones, then ``token_ids``. O(len(token_ids)) if all
        are kept.

        ``hidden_states``: the target's, where ``info.hidden_state_layers`` names any, in ascending order; each of a
        position whose token is committed now. As a rule those of all committed tokens but the last have come by then,
        but there may be none yet, or gaps: a session may be opened in the middle of a text. Positions that came before
        may come again. Those known of the first ``keep`` tokens stay valid, those after them do not.
        """

    @abstractmethod
    async def draft(self, batch: Sequence[DraftJob[S]]) -> list[Draft]:
        """Do every job (at least one); one draft per job, empty if no tokens were asked for.

        A state stands in one job only. A job that is asked to stop ends with the tokens it has by then. Runs to its end
        once started. If it raises, no state has changed.
        """

    def num_cached_tokens(self, state: S) -> int:
        """Tokens whose entries another session had computed."""
        return 0

    def room(self, state: S) -> int:
        """How many tokens could be drafted after the committed ones; 0 and less at the context limit."""
        return UNLIMITED

    def close(self, state: S) -> None:
        """Free the memory of a state, once. Later sessions may find in it what their prompts begin with."""

    def occupancy(self) -> Occupancy:
        """Blocks of open sessions, blocks that may serve later ones, and all."""
        return Occupancy()

    async def read_state_map(self) -> bytes:
        """What ``info.hidden_state_map`` names, see :mod:`engine.heads.files.packed_state_map`."""
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Free everything; no state is open any more. Idempotent."""
