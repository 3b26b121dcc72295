"""A draft that the target itself asks for proposals, for one session: rounds without messages through the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Protocol

from specdec.errors import InternalError, InvalidRequest, TandemError, Unavailable
from specdec.rpc.draft_stream import DraftStream
from specdec.types import DraftedRound, DraftOpened, Proposal
from target_service.trip_times import TripTimes

if TYPE_CHECKING:  # it loads torch
    from target_service.session.session import Session

logger = logging.getLogger(__name__)

#: Tokens that a draft streams beyond the committed ones, at most.
MAX_STREAM_TOKENS: Final = 256
#: Steps without a length from the gateway after which a draft that was asked early is asked no more.
MAX_EARLY_STEPS: Final = 8
#: Latest lengths that the draft was told, to measure its trips.
NUM_TOLD: Final = 64


class DraftListener(Protocol):
    """Who is told of the draft."""

    def draft_opened(self, opened: DraftOpened) -> None:
        """It can be asked."""
        ...

    def draft_lost(self, error: TandemError) -> None:
        """It cannot be asked any more, or never could."""
        ...


class DirectDraft:
    """Asks a draft, and has the session verify what comes: in rounds, or as a stream where the draft is far away.

    **Rounds**: the draft is asked after each verdict, and waited for. **A stream**: the session decodes by itself, and
    each step verifies what is there when it begins. The draft hears of every verdict and drafts on as if its own tokens
    were committed, until it hears otherwise. A trip that takes too much of a step (:class:`TripTimes`) makes rounds a
    stream, for drafts that offer it: those of sessions whose text does not depend on proposals. So does a proposal that
    is held up. Where earlier sessions had a stream of this draft, it is asked with its opening, which saves a trip.

    The gateway chooses the length of the proposals, and gets the verdicts. A choice that comes while a proposal is
    drafted holds from the next one on: what is verified never depends on the tokens that were drawn. With the length 0,
    and once the draft is lost, the session decodes in multi-step up to its limits.

    With the processes of ``tandem serve`` on two cores a round of four drafted tokens takes 0.86 of the time that it
    takes through the gateway, at one session and at eight (requests of both kinds in turn).
    """

    def __init__(
        self,
        session: Session,
        connect: Callable[[tuple[int, ...]], Awaitable[DraftStream]],
        listener: DraftListener,
        timeout_s: float,
        times: TripTimes,
        *,
        num_draft_tokens: int = 0,
    ) -> None:
        """``connect`` has a draft open a session with the committed tokens. ``timeout_s``: how long it may take
        for a proposal that is waited for. ``times``: of this draft, by all sessions that ask it. ``num_draft_tokens``:
        what to ask for from its first token on; ``session`` is being opened then, and decodes until the draft is.
        """
        self._session = session
        self._connect = connect
        self._listener = listener
        self._timeout_s = timeout_s
        self._times = times
        self._stream: DraftStream | None = None
        #: Committed tokens that the draft knows, and when it was told of the latest lengths.
        self._known_len = 0
        self._told_ns: deque[tuple[int, int]] = deque(maxlen=NUM_TOLD)
        #: Of messages to the draft: what they are made of.
        self._unsent: list[tuple[int, tuple[int, ...], int, int]] = []
        #: Drafted tokens of the next rounds.
        self._num_draft_tokens = num_draft_tokens
        #: Whether the session decodes without being asked by the gateway.
        self._is_leading = num_draft_tokens > 0
        if num_draft_tokens:
            session.on_committed = self._on_committed
        #: Tokens asked for since ``_asked_ns``; 0: no proposal is expected.
        self._num_asked = self._asked_ns = 0
        self._is_open = self._is_streaming = False
        #: Steps that a stream may still be asked for early, and the proposals that came.
        self._num_early = 0
        self._early: list[Proposal] = []
        self._late: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self._is_over = False
        self._task = asyncio.get_running_loop().create_task(self._run(), name="direct-draft")

    def draft(self, num_draft_tokens: int) -> None:
        """Have so many tokens drafted in each round from now on; 0: none, after the round that was asked for."""
        if self._is_over:
            return
        if self._stream is None or not self._is_open:
            self._num_draft_tokens = num_draft_tokens
            return
        if self._num_early and not num_draft_tokens:
            self._stop_early()
        self._session.on_committed = self._on_committed
        self._num_draft_tokens = min(num_draft_tokens, self._stream.opened.num_speculative_tokens)
        if self._is_streaming:
            self._stream_on()
        elif self._num_draft_tokens and not self._begin_stream():
            self._session.multi_step_decode(self._session.committed_len, 0)  # ends with the next token
        if self._session.is_idle:
            self._on_idle()

    async def close(self) -> None:
        """End the draft's session. Idempotent."""
        self._end()
        self._task.cancel()
        await asyncio.wait((self._task,))
        if self._closing is not None:
            await asyncio.wait((self._closing,))

    async def _run(self) -> None:
        try:
            token_ids = self._session.committed_token_ids()
            stream = await self._connect(token_ids)
            self._stream, self._known_len = stream, len(token_ids)
            if self._times.stream_tokens and self._times.is_far and self._session.spec.is_draft_invariant:
                self._num_early = MAX_EARLY_STEPS
                self._session.on_committed = self._on_committed
                self._ask_stream(self._times.stream_tokens)
            await stream.wait_opened()
            self._is_open = True
            self._times.stream_tokens = stream.opened.num_speculative_tokens if stream.opened.streams else 0
            self._listener.draft_opened(stream.opened)
            if self._num_draft_tokens:
                self.draft(self._num_draft_tokens)
            while True:
                self._take(await stream.receive())
        except TandemError as error:
            self._lose(error)
        except Exception as error:
            logger.exception("a draft that is asked by the target failed unexpectedly")
            self._lose(InternalError(f"the draft failed unexpectedly: {error}"))

    def _on_committed(self) -> None:
        session = self._session
        if session.finish_reason is not None:
            return
        self._times.add_step(session.step_ns, session.step_sessions)
        if self._is_streaming:
            self._stream_on()
            return
        if self._num_early and not (self._is_open and self._num_draft_tokens):
            self._num_early -= self._is_open
            if self._num_early:
                self._ask_stream(self._times.stream_tokens)
            else:
                self._stop_early()
            if not self._is_leading:
                return
        if session.is_idle:
            self._on_idle()

    def _tell(self, num_draft_tokens: int, stream_tokens: int = 0) -> None:
        """Tell the draft what is committed, and ask for tokens."""
        assert self._stream is not None, "a length is set once the draft is open"
        known_len, self._known_len = self._known_len, self._session.committed_len
        self._told_ns.append((self._known_len, time.perf_counter_ns()))
        token_ids = self._session.committed_token_ids(known_len)
        self._unsent.append((known_len, token_ids, num_draft_tokens, stream_tokens))
        if stream_tokens:
            asyncio.get_running_loop().call_soon(self._send)  # the next step begins first
        else:
            self._send()

    def _send(self) -> None:
        assert self._stream is not None, "what is told is told to an open draft"
        unsent, self._unsent = self._unsent, []
        try:
            for known_len, token_ids, num_draft_tokens, stream_tokens in [] if self._is_over else unsent:
                self._stream.post_advance(known_len, token_ids, num_draft_tokens, stream_tokens=stream_tokens)
        except TandemError as error:
            self._lose(error)

    # --- rounds ---

    def _on_idle(self) -> None:
        """Nothing is asked of the session: ask the draft, or have the session decode by itself from now on."""
        session = self._session
        if self._num_asked:
            return
        if not self._num_draft_tokens or not self._is_open:
            if self._is_open:
                session.on_committed = None
            session.multi_step_decode(session.committed_len, session.num_left)
            return
        if self._begin_stream():
            return
        self._num_asked, self._asked_ns = self._num_draft_tokens, time.perf_counter_ns()
        assert self._stream is not None, "a length is set once the draft is open"
        patience_s = self._times.patience_s if self._stream.opened.streams and session.may_stream else None
        late_s, act = self._timeout_s, self._time_out
        if patience_s is not None and patience_s < late_s:
            late_s, act = patience_s, self._stop_waiting
        self._late = asyncio.get_running_loop().call_later(late_s, act)
        self._tell(self._num_asked)

    def _time_out(self) -> None:
        self._lose(Unavailable(f"no proposal came within {self._timeout_s:g} s"))

    def _stop_waiting(self) -> None:
        """The proposal is held up, as by a lost packet: the session decodes on; it is the stream's when it comes."""
        self._num_asked = 0
        self._times.hold_up()
        self._on_idle()

    def _take(self, proposal: Proposal) -> None:
        """A proposal came."""
        if self._is_streaming:
            self._take_streamed(proposal)
            return
        if self._num_early:
            self._early.append(proposal)
            return
        session = self._session
        if not self._num_asked or proposal.base_len != self._known_len:
            return  # it belongs to no question
        self._drop_timer()
        num_asked, self._num_asked = self._num_asked, 0
        if not session.is_idle:
            return  # it was told to decode meanwhile
        if session.committed_len != self._known_len:  # and has done so
            self._on_idle()
            return
        wait_ns = time.perf_counter_ns() - self._asked_ns
        self._times.add_wait(wait_ns)
        self._times.add_trip(wait_ns - proposal.draft_ns - proposal.queue_ns)
        depth = proposal.depth if proposal.parents else 0
        session.drafted = DraftedRound(len(proposal.token_ids), num_asked, proposal.draft_ns, wait_ns, depth)
        try:
            session.offer(replace(proposal, epoch=session.spec.epoch))
        except InvalidRequest as error:
            self._lose(error)

    # --- a stream ---

    def _begin_stream(self) -> bool:
        """Have the session decode beside the draft from now on, if the draft is far away; False: rounds."""
        assert self._stream is not None, "a length is set once the draft is open"
        offers = self._stream.opened.streams and self._times.is_far
        if not offers or self._num_asked or not self._session.may_stream:
            return False
        self._is_streaming, self._num_early = True, 0
        self._told_ns.clear()
        self._stream_on()
        early, self._early = self._early, []
        for proposal in early:
            if self._is_streaming:
                self._take_streamed(proposal)
        return True

    def _stop_early(self) -> None:
        """The stream that was asked for with the opening is not wanted."""
        self._num_early, self._early = 0, []
        self._session.on_committed = None
        self._tell(0)

    def _ask_stream(self, k: int) -> None:
        self._tell(k, min(MAX_STREAM_TOKENS, (k + 1) * (2 + self._times.num_steps)))

    def _stream_on(self) -> None:
        """Tell the draft what is committed; end the stream where no drafts are wanted, or where rounds are better."""
        session, k = self._session, self._num_draft_tokens
        if k and self._times.is_far:
            assert self._stream is not None, "a length is set once the draft is open"
            k = self._stream.opened.num_speculative_tokens  # what is there costs rows alone
            session.stream(k)
            self._ask_stream(k)
            self._expect()
            return
        self._is_streaming = False
        session.end_stream()
        if k:
            session.multi_step_decode(session.committed_len, 0)  # rounds follow the next token
        else:
            session.on_committed = None
            self._tell(0)

    def _take_streamed(self, proposal: Proposal) -> None:
        try:
            begins = self._session.take_streamed(replace(proposal, epoch=self._session.spec.epoch))
        except InvalidRequest as error:
            self._lose(error)
            return
        now_ns = time.perf_counter_ns()
        if begins:
            for length, told_ns in self._told_ns:
                if length == proposal.base_len:
                    self._times.add_answer(now_ns - told_ns)
                    self._times.add_trip(now_ns - told_ns - proposal.draft_ns - proposal.queue_ns)
        self._expect()

    def _expect(self) -> None:
        """Say when the next chain should come: the draft begins it when it hears of the token that ended the last."""
        session, chain, answer_ns = self._session, self._session.chain, self._times.answer_ns
        session.due_ns = 0
        if not answer_ns or chain is None:
            return
        if (over_len := chain.over_len) is not None:
            told_ns = next((told_ns for length, told_ns in self._told_ns if length >= over_len), 0)
            session.due_ns = told_ns + answer_ns if told_ns else 0

    def _lose(self, error: TandemError) -> None:
        if not self._is_over:
            self._end()
            self._listener.draft_lost(error)
            if self._session.is_idle and self._session.on_committed is not None:
                self._on_idle()

    def _end(self) -> None:
        """Ask for nothing any more."""
        self._is_over, self._num_draft_tokens, self._num_asked = True, 0, 0
        if self._is_streaming:
            self._session.end_stream()
        if self._is_streaming or self._num_early:
            self._session.on_committed = None
        self._is_streaming, self._num_early = False, 0
        self._drop_timer()
        if self._closing is None and self._stream is not None:
            self._closing = asyncio.get_running_loop().create_task(self._stream.close())

    def _drop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
