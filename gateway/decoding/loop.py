"""The decoding loop of one request: which round comes next, and what the target and the draft are asked for.

The gateway owns the committed tokens, so a lost target costs a new prefill, and a lost draft costs speed only.
Calls go from the loop to the clients of target and draft. The one call back is :meth:`Decoding._on_proposal`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, Final

from gateway.decoding.context import DecodingContext
from gateway.decoding.draft_client import DraftClient
from gateway.decoding.lookup_client import LookupClient
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.plain_reason import PlainReason
from gateway.decoding.request import DecodingRequest, RequestState
from gateway.decoding.round import AskedRound, DirectRound, RoundRequest
from gateway.decoding.target_client import TargetClient
from gateway.pacing.lookup_pacer import LookupPace, LookupPacer
from gateway.pacing.pace import FixedPace, Pace
from gateway.pacing.round_times import WINDOW_NS
from gateway.placement.routing import HiddenStateSpec, Replica
from specdec.backends import DraftBackend, DraftRelay, TargetBackend
from specdec.direct_draft import DirectDraftSession
from specdec.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    StaleSession,
    TandemError,
    Unavailable,
)
from specdec.params import parameters
from specdec.types import DraftOpening, FinishReason, Proposal, TargetOpened, Verdict

logger = logging.getLogger(__name__)

#: Failures of a target after which the session is opened again; all others are the request's own fault.
LOST: Final = (Unavailable, StaleSession, Overloaded, Cancelled, InternalError)

#: What a refusal names where the request itself cannot be continued: its grammar, or tokens that it forbids.
PARAMETERS: Final = frozenset(row.name for row in parameters())

#: Plain verdicts that pacing is told of with a later one, at most; and the time they may take: a window. With 3, wrong
#: predictions take 2 µs more of the event loop for each token (embedded, 8 sessions).
MAX_DEFERRED: Final = 7
MAX_DEFERRED_NS: Final = WINDOW_NS

#: Tokens up to which an answer ends before a draft can help.
SHORT_ANSWER: Final = 2


@dataclass(frozen=True, slots=True)
class Interruption(Verdict):
    """In the place of a verdict: what the one before was followed by is lost, and may take a while. Without tokens."""


class Decoding:
    """One sequence being decoded. Iterate :meth:`verdicts` within ``contextlib.aclosing``."""

    def __init__(self, context: DecodingContext, request: DecodingRequest) -> None:
        """Nothing happens until the verdicts are asked for."""
        settings = context.settings
        self.request = request
        self.metrics = SpeculationMetrics()
        self._context = context
        self._is_engine = settings.has_engines
        self._state = RequestState(request)
        self._drafters = request.drafters or context.drafters
        self._draft_router = request.attached or context.router
        self._target = TargetClient(
            context.router,
            self._state,
            self.metrics,
            max_retries=settings.max_target_retries,
            wait_s=settings.target_wait_s,
        )
        self._draft = DraftClient(
            self._draft_router,
            self._state,
            self.metrics,
            method=self._drafters.service,
            timeout_s=settings.draft_timeout_s,
            on_proposal=self._on_proposal,
            open_direct=self._open_direct,
            is_direct=self._is_direct,
        )
        self._lookup = LookupClient([context.lookups[each] for each in self._drafters.lookups], self._state)
        self._pace: Pace = FixedPace(0)
        self._paced_method = ""
        self._replica: Replica[TargetBackend] | None = None
        self._lookup_pace = LookupPace(LookupPacer())
        #: The round of the latest verdict; None: it had no drafted tokens.
        self.answered: AskedRound | None = None
        #: The latest plain verdicts that pacing was not told of, and how many more there may be.
        self._deferred: list[Verdict] = []
        self._num_deferrable = 0
        #: Whether the latest verdict said that another one comes with it; and what ended the target's session.
        self._is_followed = False
        self._loss: TandemError | None = None
        #: This process's clock less that of the target.
        self._clock_ns: int | None = None
        #: Since when the loop waits for a proposal; None while it does not.
        self._waiting_since_ns: int | None = None
        #: Who waits for a verdict; whether the deadline has passed.
        self._waiting: asyncio.Task[Any] | None = None
        self._is_late = False
        #: Whether drafted tokens were ever wanted, and whether ever too many sequences were open for them.
        self._wanted_draft = self._was_crowded = False

    @property
    def opened(self) -> TargetOpened | None:
        """What the first target found on opening; None before the first verdict."""
        return self._target.opened

    def plain_reason(self) -> PlainReason:  # noqa: PLR0911 - one line for each reason
        """Why nothing was speculated by now, in case nothing was."""
        request, drafters, lookup = self.request, self._drafters, self._lookup
        asks_for_one_token = request.params.max_tokens == 1
        if self._is_engine:
            return PlainReason.ENGINE
        if not (drafters.service or drafters.lookups or len(self._draft_router.drafts) or request.prediction):
            return PlainReason.NO_DRAFT
        if request.num_speculative_tokens == 0 and not asks_for_one_token:
            return PlainReason.OFF
        if self.metrics.num_draft_failures:
            return PlainReason.FAILED
        if self._draft.off and request.num_speculative_tokens and not lookup.is_on:
            return PlainReason.DECLINED
        if self._wanted_draft:
            return PlainReason.NO_PROPOSAL if self._draft.has_proposed else PlainReason.NOT_READY
        if self._was_crowded:
            return PlainReason.CROWDED
        if asks_for_one_token or self._state.num_output_tokens <= SHORT_ANSWER:
            return PlainReason.TOO_SHORT
        if lookup.is_on and not lookup.found_any:
            return PlainReason.NO_PROPOSAL
        return PlainReason.PACING

    async def verdicts(self) -> AsyncGenerator[Verdict, None]:
        """Everything that is committed, as it is committed; the last verdict has a finish reason. There may be
        :class:`Interruption` s.

        Leaving the iteration early, by ``aclose`` or cancellation, closes every session.

        Raises:
            DeadlineExceeded: the request's deadline passed.
            Overloaded: every target is full, and nothing was generated yet.
            Unavailable: no target can be used, none came back in time after a loss, or the session was lost more often
                than it may be opened again.
        """
        deadline = self.request.deadline
        # One timer for all: one for each verdict takes 2 to 5 % more of the gateway's CPU time.
        timer = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self._expire)
        self._context.open_sessions += 1
        try:
            self._lookup.start()
            while True:
                verdict = self._commit(await self._next_in_time())
                self._is_followed = verdict.is_followed
                if verdict.finish_reason is None and self._loss is None and not self._deferred:
                    await self._start_next_round(verdict)
                    self._num_deferrable = self._count_deferrable()
                yield verdict
                if verdict.finish_reason is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            self._context.open_sessions -= 1
            self._lookup.close()
            closing = asyncio.create_task(self._close())
            self._context.closings.add(closing)
            closing.add_done_callback(self._context.closings.discard)
            await asyncio.shield(closing)

    async def _next_in_time(self) -> Verdict:
        if self.request.deadline is None:
            return await self._next()
        task = asyncio.current_task()
        assert task is not None, "iterate the verdicts in a task"
        num_cancelling = task.cancelling()
        self._waiting = task
        try:
            if not self._is_late:
                return await self._next()
        except asyncio.CancelledError:
            if not self._is_late or task.uncancel() > num_cancelling:
                raise
        finally:
            self._waiting = None
        raise DeadlineExceeded(
            f"the request's deadline passed after {self._state.num_output_tokens} tokens; give it more time or a"
            " smaller max_tokens"
        ) from None

    def _expire(self) -> None:
        """The deadline passed: nobody waits for a verdict any more."""
        self._is_late = True
        if self._waiting is not None:
            self._waiting.cancel()

    async def _next(self) -> Verdict:
        """The next verdict; a lost target is replaced."""
        target = self._target
        while True:
            if self._loss is not None:
                if self._is_followed:
                    return Interruption(0, len(self._state), ())
                loss, self._loss = self._loss, None
                await target.recover(loss)
            was_open = target.is_open
            replica = None if was_open else await target.pick()
            try:
                if replica is not None:
                    return await self._open(replica)
                if self._is_idle:
                    await self._ask()
                return self._record(*await target.receive())
            except InvalidRequest as error:
                if not was_open or error.param in PARAMETERS or (self._draft.off and not self._lookup.is_on):
                    raise
                # The session was accepted, so what the target refuses is a proposal of the draft.
                self._draft.refuse(error)
                self._draft.leave_target()
                self._lookup.stop()
                self._loss = error
            except LOST as error:
                self._draft.leave_target()
                self._loss = error

    @property
    def _is_idle(self) -> bool:
        """Whether nothing comes of the target without being asked for."""
        return self._target.is_idle and not self._draft.is_asked_by_target

    def _is_direct(self, replica: Replica[DraftBackend]) -> bool:
        """Whether the target may ask a draft itself.

        The target must be reached over a Unix socket: then it is on this machine, and reaches the draft as the gateway
        does, but for certificates, which it has none of. Lookups are compared with what the draft brings, so the
        gateway asks both.
        """
        if self._lookup.is_on or isinstance(replica.backend, DraftRelay):
            return False
        reaches = _is_local(replica) or not self._context.settings.backend_tls
        return reaches and self._replica is not None and _is_local(self._replica)

    async def _open_direct(self, replica: Replica[DraftBackend], opening: DraftOpening) -> DirectDraftSession | None:
        """Have the target open a draft's session and ask the draft itself; None where that cannot be."""
        if isinstance(replica.backend, DraftRelay):
            return await self._target.open_draft(replace(opening, address=""), replica.backend)
        if not self._is_direct(replica):
            return None
        try:
            return await self._target.open_draft(opening)
        except Unavailable as error:
            logger.debug("the target does not reach draft %s: %s", replica.name, error)
            return None

    async def _open(self, replica: Replica[TargetBackend]) -> Verdict:
        """Open a session on the target picked; its first verdict."""
        target, draft = self._target, self._draft
        self._replica = replica
        self._deferred, self._num_deferrable = [], 0
        self._choose_pace()
        self._lookup_pace.leave()
        self._lookup_pace = self._context.lookup_pace(
            replica, self._drafters.lookups, is_predicted=bool(self.request.prediction)
        )
        num_remaining = self._state.num_remaining
        opening = None
        if k := self._num_draft_tokens(num_remaining):
            opening = draft.opening(k)
            if opening is None:
                draft.prepare()
        # While no draft is wanted the rest can be asked for at once; the first verdict brings one token of it.
        num_multi_step = 0 if self._pace.k else num_remaining - 1
        states, group = draft.hidden_states_spec(), self._pace.group
        try:
            first = await target.open(num_multi_step, states, opening, pacing_group=group)
        except InvalidRequest as error:
            if not states.layers or error.param != "hidden_state_layers":
                raise
            logger.warning("the draft reads hidden states that target %s does not have: %s", replica.name, error)
            draft.refuse(error)
            first = await target.open(num_multi_step, HiddenStateSpec(), pacing_group=group)
        if opening is not None:
            draft.opened_beside(target.direct_draft, k)
        self._clock_ns = None
        self._pace.record_plain(1, len(first.token_ids), first.timings, self._committed_ns(first))
        self.answered = None
        return first

    def _choose_pace(self) -> None:
        """Pace the drafter that is used now on the target that is used now."""
        assert self._replica is not None, "pick a target first"
        self._pace.leave()
        self._paced_method = self._draft.method
        limit = 0 if self._draft.off else self.request.num_speculative_tokens
        self._pace = self._context.pace(self._replica, limit, self._paced_method)

    async def _ask(self) -> None:
        """Ask for a round as soon as its proposal is there, or for the rest of the text where there is none."""
        self._waiting_since_ns = time.perf_counter_ns()
        try:
            self._start_fitting()
            if self._target.round is None:
                await self._draft.wait()
        finally:
            self._waiting_since_ns = None
        if self._target.round is None:
            self._target.multi_step_decode(self._state.num_remaining)

    async def _start_next_round(self, verdict: Verdict) -> None:
        """After a verdict: start the next round and the draft's work before the caller handles the text.

        Waits for nobody. Where the draft has no proposal yet, :meth:`_ask` waits for it.
        """
        target, draft = self._target, self._draft
        target.commit(verdict.token_ids)
        if target.num_multi_step_left and not self.request.num_speculative_tokens:
            return
        draft.commit(verdict.hidden_states)
        if self._start_looked_up():
            await asyncio.sleep(0)  # the message leaves now
            return
        if draft.off and target.num_multi_step_left:
            return
        was_direct = draft.is_asked_by_target
        wanted = self._num_draft_tokens(self._state.num_remaining)
        is_sent = await draft.request(wanted, target_goes_on=target.num_multi_step_left > 0)
        if draft.k and draft.method != self._paced_method:  # it replaces a lost one
            self._choose_pace()
        if draft.k and not draft.is_asked_by_target:
            target.end_multi_step()  # the draft is asked again at its last token, and waited for
        elif was_direct and not draft.is_asked_by_target:
            target.expect_multi_step(self._state.num_remaining)
        elif self._is_idle:
            target.multi_step_decode(self._state.num_remaining)
        if is_sent:
            await asyncio.sleep(0)  # the message leaves now

    def _on_proposal(self) -> None:
        """The proposal for the committed tokens arrived: start its round if the loop waits for it, or let it take the
        place of tokens of multi-step decode.
        """
        if self._waiting_since_ns is not None or self._target.num_multi_step_left:
            self._start_fitting()

    def _start_looked_up(self) -> bool:
        """Start a round of what followed the last tokens before, where that is worth it.

        A model drafts better than a short match does. The match depends on committed tokens alone; whether it is tried,
        and how much of it, depends on measured times and on the draft's pace, too, but never on tokens that were drawn.
        The target waits for what follows the round, for copies are longer than rounds: on two cores (Zen 5, repeated
        text) 8 sessions have 1.11 and 1.07 times the tokens per second so, in int8 1.28 and 1.10, at 200 M 1.22.
        """
        if not self._lookup.is_on or not self._target.takes_round or self._context.crowded:
            return False
        if not self._lookup_pace.looks_up():
            return False
        match = self._lookup.find(self._state.num_remaining - 1, only_long=self._draft.k > 0)
        if match is None:
            return False
        speedup = self._pace.speedup if self._draft.k else 1.0
        num_tokens = self._lookup_pace.num_draft_tokens(match, speedup)
        if not num_tokens:
            return False
        proposal = Proposal(0, len(self._state), match.token_ids[:num_tokens])
        round_ = RoundRequest(proposal, num_tokens, is_looked_up=True, is_predicted=match.is_predicted)
        try:
            self._target.start(round_)
        except InvalidRequest as error:
            logger.warning("session %s decodes without lookups: %s", self._state.session_id, error)
            self._lookup.stop()
            return False
        self.metrics.num_received_draft_tokens += num_tokens
        return True

    def _start_fitting(self) -> None:
        """Start the round of the proposal that fits the committed tokens, where the draft has sent it."""
        if not self._target.takes_round or (proposal := self._draft.take()) is None:
            return
        since_ns = self._waiting_since_ns
        wait_ns = 0 if since_ns is None else time.perf_counter_ns() - since_ns
        try:
            self._target.start(RoundRequest(proposal, self._draft.k, wait_ns=wait_ns))
        except InvalidRequest as error:
            self._draft.refuse(error)
            return
        self.metrics.draft_wait_ns += wait_ns

    def _num_draft_tokens(self, num_remaining: int) -> int:
        """Drafted tokens wanted in the next round, with so many tokens still to be generated."""
        crowded = self._context.crowded
        idle = crowded or self._draft.off
        wanted = self._pace.num_draft_tokens(0 if idle else num_remaining, time.perf_counter_ns())
        self._was_crowded |= crowded
        self._wanted_draft |= wanted > 0
        return wanted

    def _record(self, answered: AskedRound | None, verdict: Verdict) -> Verdict:
        """Count a verdict, of a round or of multi-step decode."""
        self.answered = answered if verdict.num_draft_tokens else None
        if answered is None:
            self._deferred.append(verdict)
            if not self._is_deferred(verdict):
                self._record_deferred()
            return verdict
        if self._deferred:
            self._record_deferred()
        now_ns = self._committed_ns(verdict)
        self._lookup_pace.record(verdict.token_ids, verdict.timings, now_ns, is_drafting=self._draft.k > 0)
        depth = answered.tree_depth(verdict)
        self.metrics.draft_ns += answered.draft_ns
        if isinstance(answered, DirectRound):
            self.metrics.num_direct_rounds += 1
            self.metrics.draft_wait_ns += answered.wait_ns
            self._draft.note_direct(answered.num_tokens)
        self.metrics.record(verdict, time.perf_counter_ns() - answered.asked_ns, depth)
        if answered.is_predicted:
            self.metrics.num_accepted_predicted_tokens += verdict.num_accepted
            self.metrics.num_rejected_predicted_tokens += verdict.num_draft_tokens - verdict.num_accepted
        if answered.is_looked_up:
            self._pace.skip(verdict.timings, now_ns)
        else:
            depth = answered.whole_depth(verdict)
            num_tried, is_stream = answered.num_tried(verdict), answered.is_stream
            self._pace.record(verdict, num_tried, now_ns, tree_depth=depth, is_stream=is_stream)
        return verdict

    def _is_deferred(self, verdict: Verdict) -> bool:
        """Whether nothing is asked for after this plain verdict, whatever pacing would learn from it: pacing is told
        of it with a later one.

        A microsecond of the event loop for each token is 0.45 % of the speed where models are small (embedded, 8 and
        32 sessions, two cores): told of each verdict, lookups that found nothing had 0.958 of plain decoding, so 0.981
        (Zen 5, 8 sessions, means of four runs).
        """
        if not self._num_deferrable or not verdict.num_multi_step_left or verdict.hidden_states:
            return False
        if verdict.committed_ns - self._deferred[0].committed_ns > MAX_DEFERRED_NS:
            return False
        self._num_deferrable -= 1
        return self._pace.is_settled and (not self._lookup.is_on or self._lookup_pace.is_settled)

    def _count_deferrable(self) -> int:
        """How many of the next verdicts may be deferred."""
        target = self._target
        if self._draft.k or not target.num_multi_step_left or not target.takes_round:
            return 0
        return min(MAX_DEFERRED, self._lookup_pace.pause_left) if self._lookup.is_on else MAX_DEFERRED

    def _record_deferred(self) -> None:
        verdicts, self._deferred = self._deferred, []
        last, token_ids = verdicts[-1], [token_id for verdict in verdicts for token_id in verdict.token_ids]
        now_ns = self._committed_ns(last)
        self._lookup_pace.record(
            token_ids, last.timings, now_ns, num_verdicts=len(verdicts), is_drafting=self._draft.k > 0
        )
        self._pace.record_plain(len(verdicts), len(token_ids), last.timings, now_ns)

    def _committed_ns(self, verdict: Verdict) -> int:
        """When a verdict was committed, as if the way from the target always took what it took for the first one: those
        that come together were not committed together.
        """
        if not verdict.committed_ns:
            return time.perf_counter_ns()
        if self._clock_ns is None:
            self._clock_ns = time.perf_counter_ns() - verdict.committed_ns
        return self._clock_ns + verdict.committed_ns

    def _commit(self, verdict: Verdict) -> Verdict:
        self._state.commit(verdict.token_ids)
        if verdict.finish_reason is None and self._state.num_remaining <= 0:
            return replace(verdict, finish_reason=FinishReason.LENGTH)
        return verdict

    async def _close(self) -> None:
        self._pace.leave()
        self._lookup_pace.leave()
        try:
            await self._target.close()
        finally:
            await self._draft.close()


def _is_local(replica: Replica[Any]) -> bool:
    """Whether a replica is reached over a Unix socket."""
    return replica.name.startswith("unix:")
