"""The draft's side of one decoding loop: opening, asking, keeping proposals, losing the draft and getting it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gateway.decoding.metrics import SpeculationMetrics
from gateway.routing import HiddenStateSpec, Replica, Router
from specdec.backends import DraftBackend, DraftSession
from specdec.errors import (
    Cancelled,
    InvalidRequest,
    ModelNotSupported,
    Overloaded,
    StaleSession,
    TandemError,
    Unavailable,
)
from specdec.hidden_state_buffer import StateBuffer
from specdec.pending_proposals import MAX_PENDING_PROPOSALS, Path, PendingProposals, path_of
from specdec.types import HiddenStates, Proposal, SessionSpec

logger = logging.getLogger(__name__)

#: Seconds before a lost draft is opened again; doubled with every failure in a row.
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 5.0
#: Seconds between two looks for a draft while none can be used, at most.
LONGEST_LOOK_S: Final = 0.5
#: Proposals in a row after which a draft counts as well again.
WELL_AFTER: Final = 8
#: Seconds a draft may take to admit and prefill; the target goes on alone meanwhile.
OPEN_TIMEOUT_S: Final = 30.0
#: Seconds a session may take to close before it is left to itself.
CLOSE_TIMEOUT_S: Final = 5.0


class Closable(Protocol):
    """An open session, on a target or a draft."""

    async def close(self) -> None:
        """Release or park the cache."""
        ...


async def close_session(session: Closable) -> None:
    """Close a session; one that fails or hangs is logged and given up."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await session.close()
    except Exception:
        logger.exception("closing a session failed")


@dataclass(slots=True, eq=False)
class DraftState:
    """An open draft session, how far it knows the committed tokens, and what it has drafted."""

    session: DraftSession
    replica: Replica[DraftBackend]
    known_len: int
    #: Drafted tokens a round at most.
    num_speculative_tokens: int
    #: The target's hidden states that it reads.
    wish: HiddenStateSpec = field(default_factory=HiddenStateSpec)
    #: Drafted tokens asked for in the next round; 0: none.
    k: int = 0
    #: Proposals it may send ahead of the next verdict.
    num_ahead_proposals: int = 0
    #: What arrived and may still be of use; the proposal for the tokens committed now has the empty path.
    branches: PendingProposals = field(default_factory=PendingProposals)
    reader: asyncio.Task[None] | None = None
    #: What is done with the proposal for the tokens committed now as soon as it arrives, and who waits for that: done
    #: then, or when the session is lost.
    on_arrival: Callable[[Proposal], None] | None = None
    arrival: asyncio.Future[None] | None = None


class DraftClient:
    """Proposals for one request. Nothing here ever fails the request: without a draft there is just no proposal.

    The draft learns of every verdict by :meth:`request`. Proposals are received as they come, those for the committed
    tokens and those drafted ahead of the next verdict; :meth:`take` finds the one that fits, :meth:`wait` waits for it.
    What is committed chooses it, never its own tokens.
    """

    def __init__(
        self,
        router: Router,
        session_id: str,
        make_spec: Callable[[int], SessionSpec],
        token_ids: Sequence[int],
        metrics: SpeculationMetrics,
        *,
        num_speculative_tokens: int,
        num_ahead_proposals: int,
        timeout_s: float,
        on_ahead: Callable[[Path, Proposal], None],
    ) -> None:
        """``make_spec`` builds the spec of an opening (by its epoch) from the tokens committed by then; ``token_ids``
        are those tokens, which grow. ``num_ahead_proposals``: proposals that may be drafted ahead; ``on_ahead`` gets
        proposals for tokens that are not committed yet.
        """
        self._router = router
        self._session_id = session_id
        self._make_spec = make_spec
        self._token_ids = token_ids
        self._metrics = metrics
        self._k = num_speculative_tokens
        self._num_ahead = num_ahead_proposals
        self._timeout_s = timeout_s
        self._on_ahead = on_ahead
        self._state: DraftState | None = None
        #: The hidden states that verdicts bring, and those that no draft was told of yet.
        self._wish = HiddenStateSpec()
        self._states = StateBuffer()
        self._opening: asyncio.Task[DraftState | None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._failures = 0
        self._proposals_in_a_row = 0
        #: No draft will ever propose for this request.
        self.off = num_speculative_tokens == 0 or not len(router.drafts)

    @property
    def k(self) -> int:
        """Drafted tokens asked for in the next round."""
        return 0 if self._state is None else self._state.k

    def prepare(self) -> None:
        """Proposals will be wanted soon: open a session in the background where none is."""
        self._collect()
        if self._state is None:
            self._start()

    def wish(self) -> HiddenStateSpec:
        """The hidden states to ask the target for, which it sends from its next opening on."""
        if self.off:
            wish = HiddenStateSpec()
        else:
            wish = self._state.wish if self._state is not None else self._router.state_wish(self._session_id)
        if wish != self._wish:
            self._wish = wish
            self._states.clear()
        return wish

    def commit(self, token_ids: tuple[int, ...], hidden_states: Sequence[HiddenStates] = ()) -> None:
        """Tokens were committed: forget the proposals that assumed others, and keep the hidden states for the draft."""
        state = self._state
        if hidden_states and not self.off and (state is None or state.wish == self._wish):
            if self._wish.last_only:
                self._states.clear()
            for states in hidden_states:
                self._states.add(states)
        if state is None:
            return
        state.branches.commit(token_ids)
        if state.num_ahead_proposals:
            hit = () in state.branches
            self._metrics.num_ahead_hits += hit
            self._metrics.num_ahead_misses += not hit

    def take(self) -> Proposal | None:
        """The proposal for the tokens committed now; None where there is none yet, or none is wanted."""
        state = self._state
        if state is None or not state.k or (proposal := state.branches.take()) is None:
            return None
        self._proposals_in_a_row += 1
        if self._proposals_in_a_row >= WELL_AFTER:
            self._failures = 0
        return replace(proposal, base_len=len(self._token_ids), assumed_token_ids=())

    async def request(self, k: int) -> bool:
        """Tell the draft what is committed, and ask for ``k`` tokens after it; 0 asks for nothing. Never waits for the
        draft: where there is none, one is opened in the background. Whether a message left.
        """
        self._collect()
        state = self._state
        if state is None:
            if k > 0:
                self._start()
            return False
        k = max(0, min(k, state.num_speculative_tokens))
        if not k and not state.k:
            return False
        state.k = k
        state.num_ahead_proposals = self._num_ahead_of(state)
        news = tuple(self._token_ids[state.known_len :])
        states = self._states.take() if state.wish == self._wish else ()
        try:
            await state.session.advance(state.known_len, news, k, state.num_ahead_proposals, states)
        except Exception as error:
            self._lose(state, error)
        state.known_len = len(self._token_ids)
        return True

    def _num_ahead_of(self, state: DraftState) -> int:
        """Proposals the draft may send ahead now: with those kept and those on their way no more than may be kept."""
        if not state.k or state.wish.layers:  # the states behind a verdict are not known before it
            return 0
        room = MAX_PENDING_PROPOSALS - 1 - len(state.branches) - max(self._num_ahead, state.num_ahead_proposals)
        return max(0, min(self._num_ahead, room))

    async def wait(self, use: Callable[[Proposal], None]) -> None:
        """Wait for the proposal asked for. ``use`` gets it the moment it is there, before this returns; it gets none
        when nothing was asked for or the draft failed.
        """
        if (proposal := self.take()) is not None:
            use(proposal)
            return
        state = self._state
        if state is None or not state.k:
            return
        state.on_arrival, state.arrival = use, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await state.arrival
        except TimeoutError as error:
            self._lose(state, error)
        finally:
            state.on_arrival = state.arrival = None

    def refuse(self, error: TandemError) -> None:
        """The target cannot verify what the draft proposes, or send what it reads: go on without it, for good."""
        self.off = True
        self._states.clear()
        if self._state is not None:
            self._lose(self._state, error)

    async def close(self) -> None:
        """Close every session, those on their way included. Cancelled or not, each is closed exactly once."""
        self.off = True
        if self._opening is not None:
            await _cancel(self._opening)
            self._collect()
        if self._state is not None:
            state, self._state = self._state, None
            await self._end(state)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _start(self) -> None:
        """Open a session in the background unless one is on its way."""
        if not self.off and self._opening is None:
            self._opening = asyncio.create_task(self._open_until_it_works())

    def _collect(self) -> None:
        """Take over a session that was opened in the background."""
        task = self._opening
        if task is None or not task.done():
            return
        self._opening = None
        if not task.cancelled() and task.exception() is None and (state := task.result()) is not None:
            self._state = state
            state.reader = asyncio.create_task(self._read(state))

    async def _read(self, state: DraftState) -> None:
        try:
            while True:
                self._take_in(state, await state.session.receive())
        except Exception as error:
            self._lose(state, error)

    def _take_in(self, state: DraftState, proposal: Proposal) -> None:
        """Keep a proposal that arrived, if it may be of use."""
        if proposal.epoch != state.session.opened.epoch:
            self._metrics.num_stale += 1
            return
        length = len(self._token_ids)
        if proposal.base_len > length:
            raise StaleSession(f"a proposal for length {proposal.base_len} came at length {length}")
        self._metrics.num_received_draft_tokens += len(proposal.token_ids)
        path = path_of(proposal, self._token_ids[proposal.base_len :])
        if path is None or not state.k:
            return
        if state.branches.full:
            raise InvalidRequest(f"the draft sent more than {len(state.branches)} proposals for one verdict")
        proposal = proposal.cut(state.k)
        if not state.branches.keep(path, proposal):
            return
        if path:
            self._on_ahead(path, proposal)
        elif state.on_arrival is not None and (fitting := self.take()) is not None:
            use, state.on_arrival = state.on_arrival, None
            use(fitting)
            _settle(state)

    def _lose(self, state: DraftState, error: Exception) -> None:
        if self._state is not state:  # lost before
            return
        self._state = None
        self._note_failure(state.replica, error)
        _settle(state)
        task = asyncio.create_task(self._end(state))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, state: DraftState) -> None:
        if state.reader is not None:
            await _cancel(state.reader)
        await close_session(state.session)

    def _note_failure(self, replica: Replica[DraftBackend], error: Exception) -> None:
        self._failures += 1
        self._proposals_in_a_row = 0
        self._metrics.num_draft_failures += 1
        if isinstance(error, StaleSession):
            self._metrics.num_stale += 1
        elif isinstance(error, Unavailable | Overloaded | Cancelled | TimeoutError):
            replica.avoid()
        if isinstance(error, TandemError | TimeoutError):
            reason = str(error) or "it took too long"
            logger.warning("draft %s failed, going on without it: %s", replica.name, reason)
        else:
            logger.error("draft %s failed unexpectedly, going on without it", replica.name, exc_info=error)

    async def _open_until_it_works(self) -> DraftState | None:
        """Open a session, again and again with growing pauses; None when no draft will ever take this request."""
        pause_s = FIRST_BACKOFF_S
        while True:
            if self._failures:
                await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (self._failures - 1), LAST_BACKOFF_S))
            replica = self._router.pick_draft(self._session_id)
            if replica is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_LOOK_S)
                continue
            if self._closing:  # the server knows a session by its name: the lost one goes first
                await asyncio.wait(self._closing)
            try:
                return await self._open(replica)
            except (InvalidRequest, ModelNotSupported) as error:
                self._note_failure(replica, error)
                self.off = True
                return None
            except Exception as error:
                self._note_failure(replica, error)

    async def _open(self, replica: Replica[DraftBackend]) -> DraftState:
        self._epoch += 1
        spec = self._make_spec(self._epoch)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            session = await replica.backend.open(spec)
        k = min(self._k, session.opened.num_speculative_tokens)
        if k == 0:
            self.off = True
        wish = HiddenStateSpec() if replica.info is None else HiddenStateSpec.of(replica.info)
        return DraftState(session, replica, len(spec.token_ids), num_speculative_tokens=k, wish=wish)


def _settle(state: DraftState) -> None:
    """Let who waits for a proposal go on."""
    if state.arrival is not None and not state.arrival.done():
        state.arrival.set_result(None)


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("unexpected error while drafting", exc_info=error)
