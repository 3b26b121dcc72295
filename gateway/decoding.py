"""The decoding loop: one target session, a draft session where there is one, and the tokens committed so far.

The gateway owns the committed tokens, so a lost target is replaced by opening ``prompt + accepted tokens`` elsewhere,
and a lost draft costs speed only.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from gateway.drafting import Drafting, close_session
from gateway.routing import Replica, Router
from gateway.speculation import SpeculationMetrics
from specdec.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    StaleSession,
    TandemError,
    Unavailable,
)
from specdec.sampling.params import SamplingParams
from specdec.sessions import (
    FinishReason,
    Rule,
    SessionSpec,
    TargetBackend,
    TargetOpened,
    TargetSession,
    Verdict,
)

logger = logging.getLogger(__name__)

#: Failures of a target after which the session is opened anew; all others are the request's own fault.
LOST: Final = (Unavailable, StaleSession, Overloaded, Cancelled, InternalError)

#: Tokens decoded ahead at most while a draft may come back; the chunks double from one token.
MAX_CHUNK: Final = 16
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSettings:
    """What is the same for every request."""

    draft_timeout_s: float = 1.0
    max_target_retries: int = 3
    #: No drafting while more sequences than this are open; None always drafts.
    disable_by_batch_size: int | None = None


class Decoder:
    """Starts decoding loops and counts the open ones."""

    def __init__(self, router: Router, settings: DecodingSettings | None = None) -> None:
        self.router = router
        self.settings = settings or DecodingSettings()
        self.open_sessions = 0
        #: Closings that outlive their caller (a cancelled one); kept so that they are not collected.
        self.closings: set[asyncio.Task[None]] = set()

    @property
    def crowded(self) -> bool:
        """Whether so many sequences are open that drafting would slow them down."""
        limit = self.settings.disable_by_batch_size
        return limit is not None and self.open_sessions > limit

    def start(self, request: DecodingRequest) -> Decoding:
        """A loop for the request; nothing happens until its verdicts are asked for."""
        return Decoding(self, request)


class Decoding:
    """One sequence on its way. Iterate :meth:`verdicts` within ``contextlib.aclosing``."""

    def __init__(self, decoder: Decoder, request: DecodingRequest) -> None:
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
        self._ahead: AsyncIterator[Verdict] | None = None
        self._chunk = 1
        self._epoch = 0
        self._overloaded: set[Replica[TargetBackend]] = set()
        self._lost_sessions: set[asyncio.Task[None]] = set()
        self._drafting = Drafting(
            self._router,
            self._session_id,
            self._draft_spec,
            self.token_ids,
            self.metrics,
            num_speculative_tokens=min(request.num_speculative_tokens, self._max_tokens - 1),
            timeout_s=decoder.settings.draft_timeout_s,
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
            self._draft_next()
            while True:
                verdict = self._commit(await self._in_time())
                if verdict.finish_reason is None and self._draft_next():
                    await asyncio.sleep(0)  # the draft gets its message before the caller's work, not after it
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
            try:
                if self._target is None:
                    return await self._open()
                if self._ahead is None:
                    proposal = await self._drafting.proposal()
                    if proposal is not None:
                        self._chunk = 1
                        verdict = await self._target.verify(
                            len(self.token_ids), replace(proposal, epoch=self._epoch) if proposal.token_ids else None
                        )
                        return self._checked(verdict)
                if self._ahead is None:
                    self._ahead = self._target.decode_ahead(len(self.token_ids), self._next_chunk())
                    verdict_or_none = await anext(self._ahead, None)
                    if verdict_or_none is None:
                        raise Unavailable("the target decoded nothing")
                    return self._checked(verdict_or_none)
                verdict_or_none = await anext(self._ahead, None)
                if verdict_or_none is not None:
                    return self._checked(verdict_or_none)
                self._ahead = None
                self._draft_next()
            except LOST as error:
                await self._recover(error)

    def _next_chunk(self) -> int:
        """Tokens to decode ahead: all of them when no draft can come back, else chunks of 1, 2, 4, … 16."""
        remaining = self._end - len(self.token_ids)
        if self._drafting.off:
            return remaining
        size, self._chunk = self._chunk, min(2 * self._chunk, MAX_CHUNK)
        return min(size, remaining)

    def _draft_next(self) -> bool:
        """Let the draft work while the caller handles the verdict; whether it has something to do now.

        Not in the middle of decoding ahead.
        """
        if self._ahead is not None or self._decoder.crowded:
            return False
        if self._drafting.is_open and self._target is not None:
            return self._drafting.request(self._end - len(self.token_ids))
        self._drafting.start()
        return False

    def _checked(self, verdict: Verdict) -> Verdict:
        if verdict.base_len != len(self.token_ids) or not (verdict.token_ids or verdict.finish_reason):
            raise StaleSession(f"a verdict for length {verdict.base_len} came at length {len(self.token_ids)}")
        return verdict

    def _commit(self, verdict: Verdict) -> Verdict:
        self.token_ids.extend(verdict.token_ids)
        self.metrics.record(verdict)
        if verdict.finish_reason is None and len(self.token_ids) >= self._end:
            return replace(verdict, finish_reason=FinishReason.LENGTH)
        return verdict

    async def _open(self) -> Verdict:
        """Open a session on a target; its first verdict."""
        self._epoch += 1
        self._replica = self._router.pick_target(self._session_id, self._overloaded)
        self._target = await self._replica.backend.open(self._target_spec())
        if self.opened is None:
            self.opened = self._target.opened
        return self._checked(self._target.first)

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
            elif not isinstance(error, StaleSession):
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
        ahead, self._ahead = self._ahead, None
        if isinstance(ahead, AsyncGenerator):
            await ahead.aclose()
        target, self._target = self._target, None
        if target is not None:
            task = asyncio.create_task(close_session(target))
            self._lost_sessions.add(task)
            task.add_done_callback(self._lost_sessions.discard)
            await asyncio.shield(task)

    async def _close(self) -> None:
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
        # Without a draft the whole rest can be asked for at once; the first verdict brings one token of it.
        return replace(spec, decode_ahead_tokens=self._end - len(self.token_ids) - 1) if self._drafting.off else spec

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
