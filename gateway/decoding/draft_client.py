"""The draft's side of one decoding loop: open a session, ask for proposals, keep them, replace a lost session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.decoding.closing import close_session
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.request import RequestState
from gateway.placement.routing import HiddenStateSpec, Replica, Router
from specdec.backends import DraftBackend, DraftSession
from specdec.backoff import backoff_s
from specdec.direct_draft import DirectDraftSession
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
from specdec.types import DraftOpening, HiddenStates, Proposal

logger = logging.getLogger(__name__)

#: Seconds before a lost draft is opened again; doubled with every failure in a row.
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 5.0
#: Longest pause in seconds between two attempts to find a draft while none can be used.
MAX_RETRY_PAUSE_S: Final = 0.5
#: Proposals in a row that end the count of failures in a row.
NUM_PROPOSALS_TO_RECOVER: Final = 8
#: Seconds a draft may take to admit and prefill; the target decodes alone meanwhile.
OPEN_TIMEOUT_S: Final = 30.0

#: Has the target open the session of a draft that it then asks itself; None where it cannot.
OpenDirect = Callable[[Replica[DraftBackend], DraftOpening], Awaitable[DirectDraftSession | None]]


@dataclass(slots=True, eq=False)
class OpenDraft:
    """An open draft session, how many committed tokens it was told, and the proposal it sent."""

    #: A direct one if the target asks the draft itself: no proposal comes here.
    session: DraftSession | DirectDraftSession
    replica: Replica[DraftBackend]
    known_len: int
    #: The target's hidden states that it reads.
    states: HiddenStateSpec = field(default_factory=HiddenStateSpec)
    #: Drafted tokens asked for in the next round; 0: none.
    k: int = 0
    #: The proposal for the tokens committed now.
    proposal: Proposal | None = None
    reader: asyncio.Task[None] | None = None

    @property
    def is_direct(self) -> bool:
        """Whether the target asks it."""
        return isinstance(self.session, DirectDraftSession)


class DraftClient:
    """Proposals for one request. Nothing here fails the request: without a draft there is no proposal.

    :meth:`request` tells the draft every verdict. A reader task keeps the proposal for the committed tokens when it
    arrives; :meth:`take` returns it.
    """

    def __init__(
        self,
        router: Router,
        state: RequestState,
        metrics: SpeculationMetrics,
        *,
        method: str | None = "",
        timeout_s: float,
        on_proposal: Callable[[], None],
        open_direct: OpenDirect,
        is_direct: Callable[[Replica[DraftBackend]], bool],
    ) -> None:
        """``method``: see :attr:`Drafters.service`. ``is_direct``: whether a target may open it with its own session.

        ``on_proposal`` is told that a proposal for the committed tokens arrived, in the call that read it. This is the
        only call from here to the owner: the target gets the proposal one iteration of the event loop earlier than it
        would from an awaited future.
        """
        self._router = router
        self._state = state
        self._metrics = metrics
        self._method = method
        self._timeout_s = timeout_s
        self._on_proposal = on_proposal
        self._open_direct = open_direct
        self._is_direct = is_direct
        self._draft: OpenDraft | None = None
        #: Who waits for a proposal; done when it arrived or the draft was lost.
        self._arrival: asyncio.Future[None] | None = None
        #: The hidden states that verdicts carry, and those that no draft was told yet.
        self._states_spec = HiddenStateSpec()
        self._states = StateBuffer()
        self._opening: asyncio.Task[OpenDraft | None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._epoch = 0
        #: That of the latest :meth:`opening`.
        self._named: Replica[DraftBackend] | None = None
        self._num_failures = 0
        self._num_proposals = 0
        #: A proposal fitted what was committed when it came.
        self.has_proposed = False
        #: No draft will ever propose for this request.
        has_drafts = method is not None and bool(method or len(router.drafts))
        self.off = state.request.num_speculative_tokens == 0 or not has_drafts

    @property
    def k(self) -> int:
        """Drafted tokens asked for in the next round."""
        return 0 if self._draft is None else self._draft.k

    @property
    def is_asked_by_target(self) -> bool:
        """Whether rounds come without being asked for."""
        return self._draft is not None and self._draft.is_direct and self._draft.k > 0

    @property
    def method(self) -> str:
        """The method of the open draft, or of the one that is asked next; empty where none can be."""
        if self._method != "":
            return self._method or ""
        replica = self._router.pick_draft(self._state.session_id) if self._draft is None else self._draft.replica
        return "" if replica is None or replica.info is None else replica.info.method

    def prepare(self) -> None:
        """Open a session in the background where none is open: proposals will be asked for soon."""
        self._collect()
        if self._draft is None:
            self._start_opening()

    def opening(self, k: int) -> DraftOpening | None:
        """What a target opens beside its own session, to be asked for ``k`` tokens; None: :meth:`prepare` does.

        With the processes of ``tandem serve`` on two cores the first round of an answer is committed 6.5 ms after the
        request, in place of 15.2, and greedy answers of 128 tokens get 1.07 times the tokens per second (one session).
        """
        if self._draft is not None or self._opening is not None or self._closing or self._num_failures:
            return None
        replica = self._router.pick_draft(self._state.session_id, self._method or "")
        if replica is None or replica.info is None or HiddenStateSpec.of(replica.info).layers:
            return None
        if not self._is_direct(replica):
            return None
        self._epoch += 1
        self._named = replica
        return DraftOpening(replica.name, self._state.spec(self._epoch), self._timeout_s, k)

    def opened_beside(self, session: DirectDraftSession | None, k: int) -> None:
        """The target opens the draft of :meth:`opening`; None: it does not."""
        replica = self._named
        if session is None or replica is None:
            self.prepare()
            return
        self._draft = draft = OpenDraft(session, replica, 0, k=k)
        draft.reader = asyncio.create_task(self._watch(draft, session))

    def hidden_states_spec(self) -> HiddenStateSpec:
        """The hidden states to ask the target for, which it sends from its next opening on."""
        if self.off:
            spec = HiddenStateSpec()
        elif self._draft is not None:
            spec = self._draft.states
        else:
            spec = self._router.hidden_states_spec(self._state.session_id, self._method or "")
        if spec != self._states_spec:
            self._states_spec = spec
            self._states.clear()
        return spec

    def commit(self, hidden_states: Sequence[HiddenStates]) -> None:
        """Drop the proposal for the tokens before, and keep the hidden states for the draft."""
        draft = self._draft
        for states in hidden_states:
            self._metrics.num_hidden_states += states.num_positions
            self._metrics.hidden_state_bytes += len(states.data)
        if hidden_states and not self.off and (draft is None or draft.states == self._states_spec):
            if self._states_spec.last_only:
                self._states.clear()
            for states in hidden_states:
                self._states.add(states)
        if draft is not None:
            draft.proposal = None

    def take(self) -> Proposal | None:
        """The proposal that fits the committed tokens; None where there is none yet, or none is wanted."""
        draft = self._draft
        if draft is None or not draft.k or draft.proposal is None:
            return None
        proposal, draft.proposal = draft.proposal, None
        self._count_proposal()
        return proposal

    def note_direct(self, num_tokens: int) -> None:
        """The target verified a proposal of so many tokens that it had asked for."""
        self._metrics.num_received_draft_tokens += num_tokens
        self.has_proposed = True
        self._count_proposal()

    def _count_proposal(self) -> None:
        self._num_proposals += 1
        if self._num_proposals >= NUM_PROPOSALS_TO_RECOVER:
            self._num_failures = 0

    async def request(self, k: int, *, target_goes_on: bool = False) -> bool:
        """Tell the draft what is committed, and ask for ``k`` tokens after it; 0 asks for nothing.

        A draft without the hidden states that it reads is told nothing while ``target_goes_on``: they come with the end
        of multi-step decode.

        Never waits for the draft: where none is open, one is opened in the background. Returns whether a message left.
        """
        self._collect()
        draft = self._draft
        if draft is None:
            if k > 0:
                self._start_opening()
            return False
        if not k and not draft.k:
            return False
        draft.k = min(k, draft.session.opened.num_speculative_tokens)
        try:
            if isinstance(draft.session, DirectDraftSession):
                return draft.session.ask(draft.k)
            if target_goes_on and draft.states.layers and self._states.end < len(self._state) - 1:
                return False
            await self._advance(draft, draft.session)
        except Exception as error:
            self._lose(draft, error)
        return True

    async def _advance(self, draft: OpenDraft, session: DraftSession) -> None:
        states = self._states.take() if draft.states == self._states_spec else ()
        base_len, news = draft.known_len, self._state.after(draft.known_len)
        draft.known_len += len(news)
        await session.advance(base_len, news, draft.k, states)

    async def wait(self) -> None:
        """Wait until the proposal asked for arrived, or none will come: the draft failed or is too slow."""
        draft = self._draft
        if draft is None or not draft.k:
            return
        self._arrival = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._arrival
        except TimeoutError as error:
            self._lose(draft, error)
        finally:
            self._arrival = None

    def leave_target(self) -> None:
        """The target's session is lost, and with it that of a draft which it asked itself."""
        if self._draft is not None and self._draft.is_direct:
            self._drop(self._draft)

    def refuse(self, error: TandemError) -> None:
        """Give up drafting for good: the target cannot verify the proposals, or send what the draft reads."""
        self.off = True
        self._states.clear()
        if self._draft is not None:
            self._lose(self._draft, error)

    async def close(self) -> None:
        """Close every session, those being opened included. Cancelled or not, each is closed exactly once."""
        self.off = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
            self._collect()
        if self._draft is not None:
            draft, self._draft = self._draft, None
            await self._end(draft)
        if self._closing:
            await asyncio.gather(*self._closing)

    def _start_opening(self) -> None:
        """Open a session in the background unless one is being opened."""
        if not self.off and self._opening is None:
            self._opening = asyncio.create_task(self._open_until_it_works())

    def _collect(self) -> None:
        """Take over a session that was opened in the background.

        Attempts that fail are tried again. An exception that is none of theirs is a fault of the gateway's own, which
        would come again: the request goes on without a draft.
        """
        task = self._opening
        if task is None or not task.done():
            return
        self._opening = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("unexpected error while a draft was opened, decoding without one", exc_info=error)
            self._metrics.num_draft_failures += 1
            self.off = True
        elif (draft := task.result()) is not None:
            self._draft = draft
            draft.reader = asyncio.create_task(self._read(draft))

    async def _watch(self, draft: OpenDraft, session: DirectDraftSession) -> None:
        """Follow a draft that is not open yet."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await session.wait_opened()
        except Exception as error:
            self._lose(draft, error)
            return
        self.off |= not session.opened.num_speculative_tokens
        await self._read(draft)

    async def _read(self, draft: OpenDraft) -> None:
        try:
            while True:
                self._ingest(draft, await draft.session.receive())
        except Exception as error:
            self._lose(draft, error)

    def _ingest(self, draft: OpenDraft, proposal: Proposal) -> None:
        """Keep a proposal that arrived, if it may be of use.

        Raises:
            StaleSession, InvalidRequest: the draft broke the protocol.
        """
        opened = draft.session.opened
        if proposal.epoch != opened.epoch:
            self._metrics.num_stale += 1
            return
        if proposal.base_len > len(self._state):
            raise StaleSession(f"a proposal for length {proposal.base_len} came at length {len(self._state)}")
        num_tokens = len(proposal.token_ids)
        if num_tokens > opened.num_speculative_tokens:
            raise InvalidRequest(f"the draft sent {num_tokens} tokens, more than its {opened.num_speculative_tokens}")
        self._metrics.num_received_draft_tokens += num_tokens
        if proposal.base_len < len(self._state) or not draft.k:
            return
        self.has_proposed = True
        draft.proposal = proposal
        self._on_proposal()
        self._end_wait()

    def _end_wait(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _lose(self, draft: OpenDraft, error: Exception) -> None:
        if self._draft is not draft:  # lost before
            return
        self._note_failure(draft.replica, error)
        # What a target refuses once it would refuse again.
        self.off |= draft.is_direct and isinstance(error, InvalidRequest | ModelNotSupported)
        self._drop(draft)

    def _drop(self, draft: OpenDraft) -> None:
        """Go on without a draft, and close its session."""
        self._draft = None
        self._end_wait()
        task = asyncio.create_task(self._end(draft))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, draft: OpenDraft) -> None:
        if draft.reader is not None:
            await _cancel(draft.reader)
        await close_session(draft.session)

    def _note_failure(self, replica: Replica[DraftBackend], error: Exception) -> None:
        self._num_failures += 1
        self._num_proposals = 0
        self._metrics.num_draft_failures += 1
        if isinstance(error, StaleSession):
            self._metrics.num_stale += 1
        elif isinstance(error, Unavailable | Overloaded | Cancelled | TimeoutError):
            replica.avoid()
        if isinstance(error, TandemError | TimeoutError):
            reason = str(error) or "it took too long"
            # A crowd of requests would fill the log; the metrics count them.
            level = logging.DEBUG if isinstance(error, Overloaded) else logging.WARNING
            logger.log(level, "draft %s failed, decoding without it: %s", replica.name, reason)
        else:
            logger.error("draft %s failed unexpectedly, decoding without it", replica.name, exc_info=error)

    async def _open_until_it_works(self) -> OpenDraft | None:
        """Open a session, again and again with growing pauses; None when no draft will ever accept this request."""
        pause_s = FIRST_BACKOFF_S
        while True:
            if self._num_failures:
                await asyncio.sleep(backoff_s(self._num_failures, first_s=FIRST_BACKOFF_S, last_s=LAST_BACKOFF_S))
            replica = self._router.pick_draft(self._state.session_id, self._method or "")
            if replica is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
                continue
            if self._closing:  # the server knows a session by its name: the lost one must be closed first
                await asyncio.wait(self._closing)
            try:
                return await self._open(replica)
            except (InvalidRequest, ModelNotSupported) as error:
                self._note_failure(replica, error)
                self.off = True
                return None
            except Exception as error:
                self._note_failure(replica, error)

    async def _open(self, replica: Replica[DraftBackend]) -> OpenDraft:
        self._epoch += 1
        spec = self._state.spec(self._epoch)
        states = HiddenStateSpec() if replica.info is None else HiddenStateSpec.of(replica.info)
        session: DraftSession | DirectDraftSession | None = None
        if not states.layers:
            session = await self._open_direct(replica, DraftOpening(replica.name, spec, self._timeout_s))
        if session is None:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                session = await replica.backend.open(spec)
        if session.opened.num_speculative_tokens == 0:
            self.off = True
        return OpenDraft(session, replica, len(spec.token_ids), states)


async def _cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("unexpected error while drafting", exc_info=error)
