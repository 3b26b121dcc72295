"""The decoding loop: one target session, a draft session where there is one, and the tokens committed so far.

The gateway owns the committed tokens, so a lost target is replaced by opening ``prompt + accepted tokens`` elsewhere,
and a lost draft costs speed only.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

from gateway.decoding.context import DecodingContext
from gateway.decoding.draft_client import DraftClient, close_session
from gateway.decoding.metrics import SpeculationMetrics
from gateway.pacing.controller import FixedPace, Pace
from gateway.routing import Replica
from specdec.backends import TargetBackend, TargetSession
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
from specdec.params import SamplingParams
from specdec.pending_proposals import Path, PendingProposals
from specdec.rules import Rule
from specdec.types import FinishReason, Proposal, SessionSpec, TargetOpened, Verdict

logger = logging.getLogger(__name__)

#: Failures of a target after which the session is opened anew; all others are the request's own fault.
LOST: Final = (Unavailable, StaleSession, Overloaded, Cancelled, InternalError)

#: Tokens decoded in multi-step at most while a draft may come back; the chunks double from one token.
MAX_CHUNK: Final = 16
#: More tokens are asked for when so many of the multi-step tokens are still to come, so that the target does not wait.
LOW_WATER: Final = 8
#: Seconds before a target session is opened anew; doubled with every failure.
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingRequest:
    """One sequence to decode."""

    #: Prompt token ids, at least one.
    prompt: tuple[int, ...]
    #: ``seed`` and ``max_tokens`` are set; ``stop_token_ids`` holds the end-of-sequence tokens.
    params: SamplingParams
    #: None leaves the choice to the target.
    rule: Rule | None = None
    #: Drafted tokens a round at most; 0 decodes plainly.
    num_speculative_tokens: int = 0
    #: Name that pins the caches; None means a fresh one and nothing is kept.
    session_id: str | None = None
    #: Moment of the event loop's clock at which the request fails; None means never.
    deadline: float | None = None


class Decoding:
    """One sequence on its way. Iterate :meth:`verdicts` within ``contextlib.aclosing``."""

    def __init__(self, decoder: DecodingContext, request: DecodingRequest) -> None:
        """Nothing happens until the verdicts are asked for."""
        self.request = request
        self.metrics = SpeculationMetrics()
        #: What the first target found on opening; None before the first verdict.
        self.opened: TargetOpened | None = None
        #: Prompt and output committed so far.
        self.token_ids: list[int] = list(request.prompt)
        self._decoder = decoder
        self._router = decoder.router
        self._session_id = request.session_id or uuid.uuid4().hex
        self._max_tokens = request.params.max_tokens or 1
        self._end = len(request.prompt) + self._max_tokens
        self._target: TargetSession | None = None
        self._replica: Replica[TargetBackend] | None = None
        self._pace: Pace = FixedPace(0)
        #: The proposal whose round is under way on the target, asked for at ``_asked_ns``, or before the last verdict,
        #: which came then.
        self._round: Proposal | None = None
        self._asked_ns = 0
        #: Drafted tokens that were asked for with it.
        self._num_asked = 0
        #: Proposals the target has for rounds after the one under way.
        self._offers = PendingProposals()
        #: The target decodes up to this length without being asked again; at the other one it is asked for more.
        self._ahead_until = self._prolong_at = 0
        self._chunk = 1
        self._epoch = 0
        self._overloaded: set[Replica[TargetBackend]] = set()
        self._lost_sessions: set[asyncio.Task[None]] = set()
        self._drafting = DraftClient(
            self._router,
            self._session_id,
            self._draft_spec,
            self.token_ids,
            self.metrics,
            num_speculative_tokens=min(request.num_speculative_tokens, self._max_tokens - 1),
            num_ahead_proposals=decoder.settings.num_ahead_proposals,
            timeout_s=decoder.settings.draft_timeout_s,
            on_ahead=self._offer,
        )

    async def verdicts(self) -> AsyncGenerator[Verdict, None]:
        """Everything that is committed, as it is committed; the last verdict has a finish reason.

        Leaving the iteration early, by ``aclose`` or cancellation, closes every session.

        Raises:
            DeadlineExceeded: the request's deadline passed.
            Overloaded: every target is full, and nothing was generated yet.
            Unavailable: no target can be used, or the session was lost more often than it may be opened anew.
        """
        self._decoder.open_sessions += 1
        try:
            while True:
                verdict = self._commit(await self._in_time())
                if verdict.finish_reason is None:
                    await self._go_on(verdict)
                yield verdict
                if verdict.finish_reason is not None:
                    return
        finally:
            self._decoder.open_sessions -= 1
            closing = asyncio.create_task(self._close())
            self._decoder.closings.add(closing)
            closing.add_done_callback(self._decoder.closings.discard)
            await asyncio.shield(closing)

    async def _in_time(self) -> Verdict:
        if self.request.deadline is None:
            return await self._next()
        try:
            async with asyncio.timeout_at(self.request.deadline) as scope:
                return await self._next()
        except TimeoutError:
            if not scope.expired():
                raise
            num_tokens = len(self.token_ids) - len(self.request.prompt)
            raise DeadlineExceeded(
                f"the request's deadline passed after {num_tokens} tokens; give it more time or a smaller max_tokens"
            ) from None

    async def _next(self) -> Verdict:
        """The next verdict, from whatever source has it first; target failures are repaired on the way."""
        while True:
            target = self._target
            try:
                if target is None:
                    return await self._open()
                if self._round is None and len(self.token_ids) >= self._ahead_until:
                    await self._ask(target)
                return self._received(await target.receive())
            except InvalidRequest as error:
                if target is None or self._drafting.off:
                    raise
                # No request of ours is invalid in its middle: what the draft proposed was.
                self._drafting.refuse(error)
                await self._recover(error)
            except LOST as error:
                await self._recover(error)

    async def _ask(self, target: TargetSession) -> None:
        """Ask for a round, with the proposal as soon as it is there, or for multi-step decode where there is none."""
        waiting_since_ns = time.perf_counter_ns()

        def start(proposal: Proposal) -> None:
            self.metrics.draft_wait_ns += time.perf_counter_ns() - waiting_since_ns
            self._start(target, proposal)

        await self._drafting.wait(start)
        if self._round is None:
            self._offers.clear()
            self._multi_step_decode(target, self._next_chunk(self._end - len(self.token_ids)))

    def _multi_step_decode(self, target: TargetSession, num_tokens: int) -> None:
        """Have the target decode so many more tokens on its own account."""
        length = len(self.token_ids)
        self._ahead_until = max(self._ahead_until, length) + num_tokens
        self._prolong_at = self._ahead_until - (LOW_WATER if num_tokens > LOW_WATER else 0)
        target.multi_step_decode(length, self._ahead_until - length)

    def _prolong(self, target: TargetSession) -> None:
        """Multi-step decode comes to its end: ask for more of it, or have a draft at hand when it is over."""
        self._prolong_at = self._ahead_until
        num_remaining = self._end - self._ahead_until
        if self._num_draft_tokens(num_remaining):
            self._drafting.prepare()
        elif num_remaining > 0:
            self._multi_step_decode(target, self._next_chunk(num_remaining))

    async def _go_on(self, verdict: Verdict) -> None:
        """After a verdict: have the next round under way and the draft at work before the caller handles the text.

        Waits for nobody. Where the draft has no proposal yet, :meth:`_ask` waits for it.
        """
        self._offers.commit(verdict.token_ids)
        if (offered := self._offers.take()) is not None:
            self._begin(offered)
        self._drafting.commit(verdict.token_ids, verdict.hidden_states)
        target, length = self._target, len(self.token_ids)
        if target is None:
            return
        if length < self._ahead_until:
            if length >= self._prolong_at:
                self._prolong(target)
            return
        if self._round is None and (proposal := self._drafting.take()) is not None:
            self._start(target, proposal)
        if await self._drafting.request(self._num_draft_tokens(self._end - length)) or self._round is not None:
            await asyncio.sleep(0)  # the messages leave now

    def _num_draft_tokens(self, num_remaining: int) -> int:
        """Drafted tokens wanted in the next round, with so many tokens still to be generated."""
        idle = self._decoder.crowded or self._drafting.off
        return self._pace.num_draft_tokens(0 if idle else num_remaining, time.perf_counter_ns())

    def _start(self, target: TargetSession, proposal: Proposal) -> None:
        """Ask for the round of a proposal that fits what is committed."""
        try:
            target.offer(replace(proposal, epoch=self._epoch))
        except InvalidRequest as error:
            self._drafting.refuse(error)
        else:
            self._begin(proposal)

    def _begin(self, proposal: Proposal) -> None:
        self._round = proposal
        # Where it was drafted ahead, that was when the last round was asked for; and so was its length.
        self._num_asked = max(self._drafting.k, len(proposal.token_ids))
        self._chunk = 1
        self._asked_ns = time.perf_counter_ns()
        self.metrics.draft_ns += proposal.draft_ns

    def _offer(self, path: Path, proposal: Proposal) -> None:
        """Let the target have a proposal ahead of the verdict it assumes, where that is likely enough."""
        target = self._target
        if (
            target is None
            or proposal.likelihood < self._decoder.settings.min_offer_likelihood
            or not len(self.token_ids) + len(path) < self._end
            or len(self.token_ids) < self._ahead_until
            or path in self._offers
            or self._offers.full
        ):
            return
        try:
            target.offer(replace(proposal, epoch=self._epoch))
        except InvalidRequest as error:
            self._drafting.refuse(error)
        else:
            self._offers.keep(path, proposal)

    def _next_chunk(self, num_remaining: int) -> int:
        """Tokens of the next multi-step decode: all that remain when no draft can come back; as many as the pace says
        while no draft is wanted; else chunks of 1, 2, 4, … 16 until it is there.
        """
        if self._drafting.off:
            return num_remaining
        if not self._pace.k:
            return self._pace.num_multi_step_tokens(num_remaining, time.perf_counter_ns())
        size, self._chunk = self._chunk, min(2 * self._chunk, MAX_CHUNK)
        return min(size, num_remaining)

    def _received(self, verdict: Verdict) -> Verdict:
        now_ns = time.perf_counter_ns()
        proposal, self._round = self._round, None
        depth = None
        if proposal is not None and proposal.parents and verdict.num_draft_tokens:
            depth = proposal.cut(verdict.num_draft_tokens).depth
        self.metrics.record(self._checked(verdict), now_ns - self._asked_ns, depth)
        if proposal is None:
            self._pace.record(verdict, 0, 0, now_ns)
        else:
            # Drafted tokens that the target cut off say nothing of their acceptance.
            is_cut = verdict.num_draft_tokens < len(proposal.token_ids)
            num_asked = verdict.num_draft_tokens if is_cut else self._num_asked
            self._pace.record(verdict, num_asked, proposal.draft_ns, now_ns, tree_depth=depth)
        return verdict

    def _checked(self, verdict: Verdict) -> Verdict:
        if verdict.base_len != len(self.token_ids) or not (verdict.token_ids or verdict.finish_reason):
            raise StaleSession(f"a verdict for length {verdict.base_len} came at length {len(self.token_ids)}")
        return verdict

    def _commit(self, verdict: Verdict) -> Verdict:
        self.token_ids.extend(verdict.token_ids)
        if verdict.finish_reason is None and len(self.token_ids) >= self._end:
            return replace(verdict, finish_reason=FinishReason.LENGTH)
        return verdict

    async def _open(self) -> Verdict:
        """Open a session on a target; its first verdict."""
        self._epoch += 1
        self._replica = self._router.pick_target(self._session_id, self._overloaded)
        self._pace.leave()
        limit = 0 if self._drafting.off else min(self.request.num_speculative_tokens, self._max_tokens - 1)
        self._pace = self._decoder.pace(self._replica, limit)
        if self._num_draft_tokens(self._end - len(self.token_ids)):
            self._drafting.prepare()
        spec = self._target_spec()
        self._target = await self._open_target(self._replica, spec)
        first = self._checked(self._target.first)
        self._ahead_until = self._prolong_at = first.committed_len + spec.multi_step_tokens
        if spec.multi_step_tokens > LOW_WATER:
            self._prolong_at -= LOW_WATER
        if self.opened is None:
            self.opened = self._target.opened
        self._pace.record(first, 0, 0, time.perf_counter_ns())
        return first

    async def _open_target(self, replica: Replica[TargetBackend], spec: SessionSpec) -> TargetSession:
        try:
            return await replica.backend.open(spec)
        except InvalidRequest as error:
            if not spec.hidden_state_layers or error.param != "hidden_state_layers":
                raise
            logger.warning("the draft reads hidden states that target %s does not have: %s", replica.name, error)
            self._drafting.refuse(error)
            return await replica.backend.open(replace(spec, hidden_state_layers=()))

    async def _recover(self, error: TandemError) -> None:
        """Make room for a new session after the target was lost; raises when it was lost too often."""
        replica = self._replica
        self.metrics.num_target_failures += 1
        if isinstance(error, StaleSession):
            self.metrics.num_stale += 1
        if replica is not None:
            logger.warning("session %s lost on target %s: %s", self._session_id, replica.name, error)
            if isinstance(error, Overloaded):
                self._overloaded.add(replica)
            elif not isinstance(error, StaleSession | InvalidRequest):
                replica.avoid()
        await self._drop_target()
        if self.opened is None:
            # Nothing is lost yet: another replica may do, but the client is not kept waiting for one.
            usable = self._router.targets.usable
            if all(other in self._overloaded for other in usable):
                raise error
            if isinstance(error, Overloaded):
                return
        failures = self.metrics.num_target_failures
        if failures > self._decoder.settings.max_target_retries:
            raise Unavailable(
                f"the target was lost {failures} times, the last time with: {error}; try again later"
            ) from error
        await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (failures - 1), LAST_BACKOFF_S))

    async def _drop_target(self) -> None:
        self._round = None
        self._offers.clear()
        target, self._target = self._target, None
        if target is not None:
            task = asyncio.create_task(close_session(target))
            self._lost_sessions.add(task)
            task.add_done_callback(self._lost_sessions.discard)
            await asyncio.shield(task)

    async def _close(self) -> None:
        self._pace.leave()
        try:
            await self._drop_target()
        finally:
            await self._drafting.close()
            if self._lost_sessions:
                await asyncio.gather(*self._lost_sessions)

    def _target_spec(self) -> SessionSpec:
        params = self.request.params
        if self.opened is not None and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        spec = self._spec(self._epoch, params)
        # While no draft is wanted more can be asked for at once; the first verdict brings one token of it.
        num_multi_step = 0 if self._pace.k else self._next_chunk(self._end - len(self.token_ids) - 1)
        wish = self._drafting.wish()
        return replace(
            spec,
            multi_step_tokens=num_multi_step,
            hidden_state_layers=wish.layers,
            last_hidden_state_only=wish.last_only,
        )

    def _draft_spec(self, epoch: int) -> SessionSpec:
        return self._spec(epoch, self.request.params)

    def _spec(self, epoch: int, params: SamplingParams) -> SessionSpec:
        pinned = self.request.session_id is not None
        return SessionSpec(
            # A server that has not noticed the end of the lost session yet must not take the new one for it.
            session_id=self._session_id if pinned or epoch == 1 else f"{self._session_id}.{epoch}",
            epoch=epoch,
            token_ids=tuple(self.token_ids),
            prompt_len=len(self.request.prompt),
            params=params,
            rule=self.request.rule,
            num_speculative_tokens=min(self.request.num_speculative_tokens, self._max_tokens - 1),
            park=pinned,
        )
