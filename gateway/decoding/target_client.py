"""The target's side of one decoding loop: open a session, ask for rounds, replace a lost session."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Final

from gateway.decoding.closing import close_session
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.request import RequestState
from gateway.decoding.round import AskedRound, DirectRound, RoundRequest
from gateway.placement.routing import HiddenStateSpec, Replica, Router
from specdec.backends import DraftOpener, DraftRelay, TargetBackend, TargetSession
from specdec.backoff import backoff_s
from specdec.direct_draft import DirectDraftSession
from specdec.errors import InvalidRequest, Overloaded, StaleSession, TandemError, Unavailable
from specdec.types import DraftOpening, TargetOpened, Verdict

logger = logging.getLogger(__name__)

#: Seconds before a target session is opened again; doubled with every failure.
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 2.0
#: Seconds that the target may take to open the session of a draft; it decodes meanwhile.
OPEN_DRAFT_TIMEOUT_S: Final = 30.0


class TargetClient:
    """The open session of one request, and what the target was asked for. A lost session is replaced by opening
    ``prompt + committed tokens`` elsewhere.
    """

    def __init__(
        self, router: Router, state: RequestState, metrics: SpeculationMetrics, *, max_retries: int, wait_s: float
    ) -> None:
        """``max_retries``: times a lost session is replaced; ``wait_s``: how long it waits for a target to return."""
        self._router = router
        self._state = state
        self._metrics = metrics
        self._max_retries = max_retries
        self._wait_s = wait_s
        self._first_session: TargetSession | None = None
        #: The round in progress.
        self.round: RoundRequest | None = None
        #: Tokens that the target decodes next by itself, and the length up to which it may.
        self.num_multi_step_left = self._multi_step_end = 0
        #: Rounds asked for in place of multi-step tokens, without what was committed since: the target takes one or
        #: drops it.
        self._early: list[RoundRequest] = []
        self._is_ending = False
        self._session: TargetSession | None = None
        #: The same where it can ask drafts.
        self._opener: DraftOpener | None = None
        self._has_opened = asyncio.Event()
        self._replica: Replica[TargetBackend] | None = None
        self._epoch = 0
        self._overloaded: set[Replica[TargetBackend]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def opened(self) -> TargetOpened | None:
        """What the first target found on opening; None before the first verdict."""
        return None if self._first_session is None else self._first_session.opened

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing comes without being asked for."""
        return self.round is None and not self.num_multi_step_left

    @property
    def takes_round(self) -> bool:
        """Whether a round may be asked for: none is that the target may still take."""
        return self.round is None and not self._early

    async def pick(self) -> Replica[TargetBackend]:
        """Choose the replica of the next opening. A session that was lost waits for a target to return.

        Raises:
            Unavailable: no target can be used.
        """
        self._epoch += 1
        if self._metrics.num_target_failures and not self._router.ready:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._router.wait_ready()
            except TimeoutError:
                raise Unavailable(
                    f"the target was lost and none came back within {self._wait_s:g} s; try again later"
                ) from None
        request = self._state.request
        self._replica = self._router.pick_target(
            self._state.session_id, self._overloaded, is_bound=request.is_named, prefixes=request.prefixes
        )
        return self._replica

    async def open(
        self, num_multi_step: int, states: HiddenStateSpec, draft: DraftOpening | None = None, *, pacing_group: str
    ) -> Verdict:
        """Open a session on the replica picked; its first verdict.

        ``num_multi_step``: tokens to decode right after it; ``states``: the hidden states verdicts carry; ``draft``:
        what the target should open meanwhile (:attr:`direct_draft`); ``pacing_group``: that of its pace.
        """
        assert self._replica is not None, "pick a replica first"
        spec = replace(
            self._state.spec(self._epoch, with_prompt_logprobs=self.opened is None),
            num_speculative_tokens=self._state.request.max_round_tokens,
            multi_step_tokens=num_multi_step,
            draft=draft,
            pacing_group=pacing_group,
        )
        spec = states.asked_in(spec)
        self._session = session = await self._replica.backend.open(spec)
        self._opener = session if isinstance(session, DraftOpener) else None
        if session.opened.wants_state_map:
            self._router.carry_state_map(self._replica, spec)
        self._multi_step_end = len(self._state) + 1 + num_multi_step
        first = self._checked(session.first)
        self._has_opened.set()
        self.num_multi_step_left = first.num_multi_step_left
        self._first_session = self._first_session or session
        return first

    @property
    def direct_draft(self) -> DirectDraftSession | None:
        """The draft that the target asks, open or not."""
        return None if self._opener is None else self._opener.draft

    async def open_draft(self, opening: DraftOpening, relay: DraftRelay | None = None) -> DirectDraftSession | None:
        """Have the target open the session of a draft, at an address or behind ``relay``, which it asks itself then;
        None where it cannot. Waits for a session of the target's own.

        Raises:
            TandemError: the draft cannot be opened.
            TimeoutError: it takes too long.
        """
        await self._has_opened.wait()
        opened = self._open_session.opened
        asks = opened.asks_drafts if opening.address.startswith("unix:") else opened.asks_remote_drafts
        if relay is not None:
            asks = opened.asks_relayed_drafts
        if not asks or self._opener is None:
            return None
        async with asyncio.timeout(OPEN_DRAFT_TIMEOUT_S):
            return await self._opener.open_draft(opening, relay)

    def start(self, round_: RoundRequest) -> None:
        """Ask for a round whose proposal fits the committed tokens.

        While multi-step decode continues, the target takes what is left of it, or drops it.

        Raises:
            InvalidRequest: the target cannot verify it.
        """
        proposal = replace(round_.proposal, epoch=self._epoch, base_len=len(self._state))
        self._open_session.offer(proposal)
        if self.num_multi_step_left:
            self._early.append(replace(round_, proposal=proposal))
        else:
            self.round, self._multi_step_end = round_, 0

    def multi_step_decode(self, num_tokens: int) -> None:
        """Have the target decode so many more tokens without proposals."""
        self.expect_multi_step(num_tokens)
        self._open_session.multi_step_decode(len(self._state), num_tokens)

    def expect_multi_step(self, num_tokens: int) -> None:
        """The target goes over to decoding so many more tokens without proposals by itself."""
        self.num_multi_step_left, self._is_ending = num_tokens, False
        self._multi_step_end = len(self._state) + num_tokens

    def end_multi_step(self) -> None:
        """Have multi-step decode end with its next token."""
        if self.num_multi_step_left and not self._is_ending:
            self._is_ending = True
            self._open_session.multi_step_decode(len(self._state), 0)

    async def receive(self) -> tuple[AskedRound | None, Verdict]:
        """The next verdict, and its round; None: it is multi-step decode's."""
        verdict = self._checked(await self._open_session.receive())
        answered: AskedRound | None = self.round
        num_tokens = verdict.num_draft_tokens
        if verdict.drafted is not None:
            answered = DirectRound.of(verdict.drafted, verdict.timings, time.perf_counter_ns())
        elif answered is None and num_tokens:
            # Near the limit the target drops drafted tokens; the newest of equal rounds counts.
            rounds = [early for early in reversed(self._early) if len(early.proposal.token_ids) >= num_tokens]
            answered = min(rounds, key=lambda early: len(early.proposal.token_ids))
        self.round = None
        self.num_multi_step_left = verdict.num_multi_step_left
        if not verdict.num_multi_step_left:
            self._forget_multi_step()
        return answered, verdict

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Tokens were committed: keep what is left of the rounds asked for in place of multi-step tokens."""
        self._early = [rest for early in self._early if (rest := early.after(token_ids)) is not None]

    async def recover(self, error: TandemError) -> None:
        """Prepare for a new session after the target was lost; raises when it was lost too often."""
        replica = self._replica
        self._metrics.num_target_failures += 1
        if isinstance(error, StaleSession):
            self._metrics.num_stale += 1
        if replica is not None:
            # A crowd of requests would fill the log; the metrics count them.
            level = logging.DEBUG if isinstance(error, Overloaded) else logging.WARNING
            logger.log(level, "session %s lost on target %s: %s", self._state.session_id, replica.name, error)
            if isinstance(error, Overloaded):
                self._overloaded.add(replica)
            elif not isinstance(error, StaleSession | InvalidRequest):
                replica.avoid()
        await self._drop()
        num_tokens = self._state.num_output_tokens
        if num_tokens and not self._state.request.is_resumable:
            raise Unavailable(
                f"the engine was lost after {num_tokens} tokens, and another one cannot continue the text as this"
                " one would have: the request has a seed, penalties, bad_words or structured outputs; send it again"
            ) from error
        if self.opened is None and isinstance(error, Overloaded):
            # Nothing is lost yet: another replica may do, but the client is not kept waiting for one.
            if all(other in self._overloaded for other in self._router.targets.usable):
                raise error
            return
        failures = self._metrics.num_target_failures
        if failures > self._max_retries:
            raise Unavailable(f"the target was lost {failures} times, the last time with: {error}") from error
        await asyncio.sleep(backoff_s(failures, first_s=FIRST_BACKOFF_S, last_s=LAST_BACKOFF_S))

    async def close(self) -> None:
        """Close every session. Cancelled or not, each is closed exactly once."""
        await self._drop()
        if self._closing:
            await asyncio.gather(*self._closing)

    @property
    def _open_session(self) -> TargetSession:
        assert self._session is not None, "no session is open"
        return self._session

    def _checked(self, verdict: Verdict) -> Verdict:
        length = len(self._state)
        if verdict.base_len != length or not (verdict.token_ids or verdict.finish_reason):
            raise StaleSession(f"a verdict for length {verdict.base_len} came at length {length}")
        if not self._is_possible(verdict):
            raise Unavailable("the target sent a verdict that cannot be")
        return verdict

    def _is_possible(self, verdict: Verdict) -> bool:
        """Whether a verdict answers what was asked for; one that does not comes of a fault of the target."""
        rounds = self._early if self.round is None else [self.round]
        num_direct = 0 if self.direct_draft is None else self.direct_draft.opened.num_speculative_tokens
        num_asked = max((len(asked.proposal.token_ids) for asked in rounds), default=num_direct)
        token_ids, num_left, num_remaining = verdict.token_ids, verdict.num_multi_step_left, self._state.num_remaining
        # A target that may ask a draft decodes in multi-step where it does not.
        end = len(self._state) + num_remaining if num_direct else self._multi_step_end
        return (
            len(token_ids) <= num_remaining
            and (not num_left or verdict.base_len + len(token_ids) + num_left <= end)
            and max(token_ids, default=0) < self._router.model().vocab_size
            and verdict.num_accepted <= verdict.num_draft_tokens <= num_asked
            and len(verdict.logprobs) in (0, len(token_ids))
        )

    def _forget_multi_step(self) -> None:
        self._early, self._multi_step_end, self._is_ending = [], 0, False

    async def _drop(self) -> None:
        self.round, self.num_multi_step_left = None, 0
        self._forget_multi_step()
        self._has_opened.clear()
        session, self._session, self._opener = self._session, None, None
        if session is not None:
            task = asyncio.create_task(close_session(session))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            await asyncio.shield(task)
