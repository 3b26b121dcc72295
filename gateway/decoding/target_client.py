"""The target's side of one decoding loop: open a session, ask for rounds, replace a lost session."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Final

from gateway.decoding.closing import close_session
from gateway.decoding.metrics import SpeculationMetrics
from gateway.decoding.request import RequestState
from gateway.routing import HiddenStateSpec, Replica, Router
from specdec.backends import TargetBackend, TargetSession
from specdec.errors import InvalidRequest, Overloaded, StaleSession, TandemError, Unavailable
from specdec.pending_proposals import Path, PendingProposals
from specdec.types import Proposal, TargetOpened, Verdict

logger = logging.getLogger(__name__)

#: More multi-step tokens are asked for when so many are still to come, so that the target does not wait.
LOW_WATER: Final = 8
#: Seconds before a target session is opened again; doubled with every failure.
FIRST_BACKOFF_S: Final = 0.05
LAST_BACKOFF_S: Final = 2.0


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
        #: What the first target found on opening; None before the first verdict.
        self.opened: TargetOpened | None = None
        #: The proposal whose round is in progress.
        self.round: Proposal | None = None
        #: Proposals the target holds for rounds after the one in progress.
        self._offered = PendingProposals()
        #: Length up to which the target decodes without being asked, and the one at which it is asked for more.
        self._multi_step_end = self._extend_at = 0
        self._session: TargetSession | None = None
        self._replica: Replica[TargetBackend] | None = None
        self._epoch = 0
        self._overloaded: set[Replica[TargetBackend]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self._session is not None

    @property
    def num_multi_step_left(self) -> int:
        """Multi-step tokens still to come."""
        return max(0, self._multi_step_end - len(self._state))

    @property
    def needs_extension(self) -> bool:
        """Whether so few multi-step tokens are still to come that more should be asked for."""
        return len(self._state) >= self._extend_at

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
        self._replica = self._router.pick_target(
            self._state.session_id, self._overloaded, is_bound=self._state.request.session_id is not None
        )
        return self._replica

    async def open(self, num_multi_step: int, states: HiddenStateSpec) -> Verdict:
        """Open a session on the replica picked; its first verdict.

        ``num_multi_step``: tokens to decode right after it; ``states``: the hidden states verdicts carry.
        """
        assert self._replica is not None, "pick a replica first"
        spec = replace(
            self._state.spec(self._epoch, with_prompt_logprobs=self.opened is None),
            multi_step_tokens=num_multi_step,
            hidden_state_layers=states.layers,
            last_hidden_state_only=states.last_only,
        )
        self._session = session = await self._replica.backend.open(spec)
        first = self._checked(session.first)
        self._expect(first.committed_len + num_multi_step, num_multi_step)
        self.opened = self.opened or session.opened
        return first

    def start(self, proposal: Proposal) -> None:
        """Ask for the round of a proposal that fits the committed tokens.

        Raises:
            InvalidRequest: the target cannot verify it.
        """
        length = len(self._state)
        self._open_session.offer(replace(proposal, epoch=self._epoch, base_len=length, assumed_token_ids=()))
        self.round = proposal

    def offer(self, path: Path, proposal: Proposal) -> None:
        """Give the target a proposal before the verdict it assumes, where it can be kept. Raises what :meth:`start`
        does.
        """
        if self._session is None or self.num_multi_step_left or path in self._offered or self._offered.full:
            return
        self._session.offer(replace(proposal, epoch=self._epoch))
        self._offered.keep(path, proposal)

    def multi_step_decode(self, num_tokens: int) -> None:
        """Have the target decode so many more tokens without proposals; it drops those it holds."""
        self._offered.clear()
        length = len(self._state)
        self._expect(max(self._multi_step_end, length) + num_tokens, num_tokens)
        self._open_session.multi_step_decode(length, self._multi_step_end - length)

    def stop_extending(self) -> None:
        """Ask for no more multi-step tokens than those still to come."""
        self._extend_at = self._multi_step_end

    async def receive(self) -> Verdict:
        """The next verdict. The round that was in progress is over."""
        verdict = self._checked(await self._open_session.receive())
        self.round = None
        return verdict

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Tokens were committed: where the target holds the proposal that fits now, its round is in progress."""
        self._offered.commit(token_ids)
        self.round = self._offered.take()

    async def recover(self, error: TandemError) -> None:
        """Prepare for a new session after the target was lost; raises when it was lost too often."""
        replica = self._replica
        self._metrics.num_target_failures += 1
        if isinstance(error, StaleSession):
            self._metrics.num_stale += 1
        if replica is not None:
            logger.warning("session %s lost on target %s: %s", self._state.session_id, replica.name, error)
            if isinstance(error, Overloaded):
                self._overloaded.add(replica)
            elif not isinstance(error, StaleSession | InvalidRequest):
                replica.avoid()
        await self._drop()
        if self.opened is None and isinstance(error, Overloaded):
            # Nothing is lost yet: another replica may do, but the client is not kept waiting for one.
            if all(other in self._overloaded for other in self._router.targets.usable):
                raise error
            return
        failures = self._metrics.num_target_failures
        if failures > self._max_retries:
            raise Unavailable(f"the target was lost {failures} times, the last time with: {error}") from error
        await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** (failures - 1), LAST_BACKOFF_S))

    async def close(self) -> None:
        """Close every session. Cancelled or not, each is closed exactly once."""
        await self._drop()
        if self._closing:
            await asyncio.gather(*self._closing)

    @property
    def _open_session(self) -> TargetSession:
        assert self._session is not None, "no session is open"
        return self._session

    def _expect(self, multi_step_end: int, num_tokens: int) -> None:
        """Multi-step decode goes up to this length, with the last ``num_tokens`` just asked for."""
        self._multi_step_end = multi_step_end
        self._extend_at = multi_step_end - (LOW_WATER if num_tokens > LOW_WATER else 0)

    def _checked(self, verdict: Verdict) -> Verdict:
        length = len(self._state)
        if verdict.base_len != length or not (verdict.token_ids or verdict.finish_reason):
            raise StaleSession(f"a verdict for length {verdict.base_len} came at length {length}")
        if not self._is_possible(verdict):
            raise Unavailable("the target sent a verdict that cannot be")
        return verdict

    def _is_possible(self, verdict: Verdict) -> bool:
        """Whether a verdict answers what was asked for; one that does not comes of a fault of the target."""
        token_ids, num_asked = verdict.token_ids, len(self.round.token_ids) if self.round is not None else 0
        return (
            len(token_ids) <= self._state.num_remaining
            and max(token_ids, default=0) < self._router.model().vocab_size
            and verdict.num_accepted <= verdict.num_draft_tokens <= num_asked
            and len(verdict.logprobs) in (0, len(token_ids))
        )

    async def _drop(self) -> None:
        self.round = None
        self._offered.clear()
        session, self._session = self._session, None
        if session is not None:
            task = asyncio.create_task(close_session(session))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            await asyncio.shield(task)
