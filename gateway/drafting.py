"""The draft's side of one decoding loop: opening, proposing, losing it and getting it back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from gateway.routing import Replica, Router
from gateway.speculation import SpeculationMetrics
from specdec.errors import (
    Cancelled,
    InvalidRequest,
    ModelNotSupported,
    Overloaded,
    StaleSession,
    TandemError,
    Unavailable,
)
from specdec.sessions import DraftBackend, DraftSession, Proposal, SessionSpec

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


@dataclass(slots=True)
class DraftState:
    """An open draft session and how far it knows the committed tokens."""

    session: DraftSession
    replica: Replica[DraftBackend]
    known_len: int
    num_speculative_tokens: int


class Drafting:
    """Proposals for one request. Nothing here ever fails the request: without a draft there is just no proposal.

    ``make_spec`` builds the spec of an opening (by its epoch) from the tokens committed by then.
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
        timeout_s: float,
    ) -> None:
        self._router = router
        self._session_id = session_id
        self._make_spec = make_spec
        self._token_ids = token_ids
        self._metrics = metrics
        self._k = num_speculative_tokens
        self._timeout_s = timeout_s
        self._state: DraftState | None = None
        self._opening: asyncio.Task[DraftState | None] | None = None
        self._proposing: asyncio.Task[Proposal | None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._failures = 0
        self._proposals_in_a_row = 0
        #: No draft will ever propose for this request.
        self.off = num_speculative_tokens == 0 or not len(router.drafts)

    @property
    def is_open(self) -> bool:
        """Whether a draft can be asked for a proposal now."""
        self._collect()
        return self._state is not None

    def start(self) -> None:
        """Open a session in the background unless there is one, or one on its way."""
        if self.off or self._opening is not None or self._state is not None:
            return
        self._opening = asyncio.create_task(self._open_until_it_works())

    def request(self, num_remaining: int) -> bool:
        """Start drafting after the tokens committed now; :meth:`proposal` waits for it. Whether any began."""
        self._collect()
        state = self._state
        if state is None or self._proposing is not None:
            return False
        # A round commits one token more than was drafted.
        k = min(state.num_speculative_tokens, num_remaining - 1)
        if k > 0:
            self._proposing = asyncio.create_task(self._propose(state, k))
        return k > 0

    async def proposal(self) -> Proposal | None:
        """The proposal asked for; None when there is none, because nothing was asked or the draft failed."""
        task = self._proposing
        if task is None:
            return None
        proposal = await task
        self._proposing = None
        return proposal

    async def close(self) -> None:
        """Close every session, those on their way included. Cancelled or not, each is closed exactly once."""
        self.off = True
        if self._proposing is not None:
            await _cancel(self._proposing)
            self._proposing = None
        if self._opening is not None:
            await _cancel(self._opening)
            self._collect()
        if self._state is not None:
            state, self._state = self._state, None
            await close_session(state.session)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _collect(self) -> None:
        """Take over a session that was opened in the background."""
        task = self._opening
        if task is None or not task.done():
            return
        self._opening = None
        if not task.cancelled() and task.exception() is None:
            self._state = task.result()

    async def _propose(self, state: DraftState, k: int) -> Proposal | None:
        committed_len = len(self._token_ids)
        news = tuple(self._token_ids[state.known_len :])
        try:
            async with asyncio.timeout(self._timeout_s):
                proposal = await state.session.propose(state.known_len, news, k)
            state.known_len = committed_len
            if proposal.base_len + len(proposal.assumed_token_ids) != committed_len:
                raise StaleSession(f"a proposal for length {proposal.base_len} came at length {committed_len}")
        except Exception as error:
            self._lose(state, error)
            return None
        self._proposals_in_a_row += 1
        if self._proposals_in_a_row >= WELL_AFTER:
            self._failures = 0
        if proposal.assumed_token_ids:
            proposal = replace(proposal, base_len=committed_len, assumed_token_ids=())
        return proposal

    def _lose(self, state: DraftState, error: Exception) -> None:
        if self._state is state:
            self._state = None
        self._note_failure(state.replica, error)
        task = asyncio.create_task(close_session(state.session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

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
        return DraftState(session, replica, len(spec.token_ids), k)


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("unexpected error while drafting", exc_info=error)
