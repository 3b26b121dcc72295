"""The draft service in one process: its drafter, its sessions and their admission. The servicer puts gRPC around it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

from draft_service.ahead.acceptance_stats import AcceptanceStats
from draft_service.ahead.scheduler import AheadScheduler
from draft_service.batcher import Batcher
from draft_service.drafters.base import Drafter, DraftState
from draft_service.drafters.combined import CombinedDrafter
from draft_service.drafters.lookup.base import LookupDrafter
from draft_service.drafters.lookup.ngram import NgramDrafter
from draft_service.drafters.lookup.suffix import SuffixDrafter
from draft_service.drafters.none import NoDrafter
from draft_service.session import CoreSession
from specdec.errors import InvalidRequest, Overloaded, Unavailable
from specdec.methods import LOOKUP_METHODS
from specdec.rules import DraftSampling
from specdec.settings import DraftSettings, SchedulerSettings, SpeculativeSettings
from specdec.tree_shape import TreeShape
from specdec.types import ModelInfo, ServerLoad, SessionSpec

#: Seconds a session may wait for others to end. Just long enough for streams that are closing at this moment: a
#: session without a draft is only slower, one that waits for a draft does not even begin to be fast.
ADMISSION_WAIT_S: Final = 0.25


async def load_drafter(settings: DraftSettings) -> Drafter[Any]:
    """The drafter that ``settings.speculative.method`` names. Only one with a model imports torch.

    Raises:
        ModelNotSupported: the checkpoint cannot be run correctly.
        InvalidRequest: a setting does not fit the model or the machine.
    """
    speculative = settings.speculative
    first, *rest = speculative.methods
    if not rest:
        return await _load(first, settings)
    lookup = await _load_lookup(first, speculative)
    return CombinedDrafter(lookup, await _load(rest[0], settings), speculative)


async def _load(method: str, settings: DraftSettings) -> Drafter[Any]:
    if method in LOOKUP_METHODS:
        return await _load_lookup(method, settings.speculative)
    if method == "none":
        return NoDrafter()
    if method == "draft_model":
        from draft_service.drafters.draft_model import ModelDrafter  # noqa: PLC0415 (torch)

        return await ModelDrafter.load(settings)
    return await _load_head_drafter(settings)


async def _load_lookup(method: str, speculative: SpeculativeSettings) -> LookupDrafter[Any]:
    if method == "suffix":
        return await asyncio.to_thread(SuffixDrafter, speculative)  # the first time it is compiled
    return NgramDrafter(speculative)


async def _load_head_drafter(settings: DraftSettings) -> Drafter[Any]:
    from draft_service.drafters.heads.eagle import EagleDrafter  # noqa: PLC0415 (torch)
    from draft_service.drafters.heads.medusa import MedusaDrafter  # noqa: PLC0415
    from draft_service.drafters.heads.mlp_speculator import MlpDrafter  # noqa: PLC0415

    match settings.speculative.methods[-1]:
        case "medusa":
            return await MedusaDrafter.load(settings)
        case "mlp_speculator":
            return await MlpDrafter.load(settings)
        case _:
            return await EagleDrafter.load(settings)


class DraftCore:
    """A :class:`~specdec.backends.DraftBackend` on a drafter. All methods run on one event loop."""

    def __init__(self, drafter: Drafter[Any], scheduler: SchedulerSettings, tree: TreeShape | None = None) -> None:
        """``tree``: what sessions have drafted; None: chains."""
        self._drafter = drafter
        self.tree = tree
        self._scheduler = scheduler
        self.lookahead = AheadScheduler()
        self.odds = {sampling: AcceptanceStats() for sampling in DraftSampling}
        self._sessions: set[CoreSession] = set()
        self._batcher: Batcher[Any] = Batcher(
            drafter, scheduler.max_num_batched_tokens, self.lookahead, lambda: len(self._sessions)
        )
        self._num_held = 0
        self._waiting: deque[asyncio.Event] = deque()
        self._num_stale = 0
        self._draining = False

    @classmethod
    async def start(cls, settings: DraftSettings) -> Self:
        """Load and warm up the drafter the settings name.

        Raises:
            ModelNotSupported: the checkpoint cannot be run correctly.
            InvalidRequest: a setting does not fit the model or the machine.
        """
        speculative = settings.speculative
        tree = speculative.tree if speculative.needs_model else None
        return cls(await load_drafter(settings), settings.scheduler, tree)

    async def open(self, spec: SessionSpec) -> CoreSession:
        """Admit a session and prefill its tokens.

        Raises:
            Overloaded: no place or memory, now and within the next moment.
            InvalidRequest: the tokens or parameters do not fit the model.
            Unavailable: the service is shutting down.
        """
        self._check(spec)
        state = await self._admit(spec)
        session = CoreSession(self, spec, state)
        self._sessions.add(session)
        try:
            await session.prefill()
        except BaseException:
            await session.close()
            raise
        return session

    async def info(self) -> ModelInfo:
        """Describe the drafter."""
        return self._drafter.info

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        used, total, parked = self._drafter.occupancy()
        ahead = self.lookahead.counts
        return ServerLoad(
            open_sessions=self._num_held,
            parked_sessions=parked,
            waiting_sessions=len(self._waiting),
            used_blocks=used,
            total_blocks=total,
            stale_messages=self._num_stale,
            num_batches=self._batcher.num_batches,
            busy_ns=self._batcher.busy_ns,
            ahead_proposals=ahead.num_proposals,
            ahead_hits=ahead.num_hits,
            wasted_draft_tokens=ahead.num_wasted_tokens,
        )

    def drain(self) -> None:
        """Open no new sessions; open ones go on."""
        self._draining = True

    async def close(self) -> None:
        """End all sessions, then the drafter. Idempotent."""
        self._draining = True
        await self._batcher.close()
        for session in tuple(self._sessions):
            await session.close()
        await self._drafter.shutdown()

    def count_stale(self) -> None:
        """Count a message that came too late or belongs to another opening."""
        self._num_stale += 1

    # --- for the sessions ---

    @property
    def batcher(self) -> Batcher[Any]:
        """Where sessions submit their wishes."""
        return self._batcher

    @property
    def drafter(self) -> Drafter[Any]:
        """What drafts."""
        return self._drafter

    def release(self, session: CoreSession, state: DraftState, park_as: str | None) -> None:
        """Free what a session holds and let the next one in."""
        self._sessions.discard(session)
        self._num_held -= 1
        self._drafter.close(state, park_as)
        self._wake_next()

    def check_tokens(self, token_ids: Sequence[int]) -> None:
        """Raise :class:`InvalidRequest` unless every token is one of the model's."""
        vocab_size = self._drafter.info.vocab_size or 2**32
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise InvalidRequest(
                f"token_ids holds {wrong}; the draft's tokens are 0 to {vocab_size - 1}", param="token_ids"
            )

    # --- admission ---

    def _check(self, spec: SessionSpec) -> None:
        if self._draining:
            raise Unavailable("the draft service is shutting down; use another replica")
        if not 1 <= spec.prompt_len <= len(spec.token_ids):
            raise InvalidRequest(
                f"prompt_len is {spec.prompt_len}, outside [1, {len(spec.token_ids)}], the number of token_ids",
                param="prompt_len",
            )
        self.check_tokens(spec.token_ids)

    async def _admit(self, spec: SessionSpec) -> DraftState:
        """A state for the session, first come, first served; those who do not fit now wait for a moment."""
        if not self._waiting:
            try:
                return self._place(spec)
            except Overloaded as error:
                refusal = error
        else:
            refusal = self._crowded()
        if len(self._waiting) >= self._scheduler.max_waiting:
            raise refusal
        turn = asyncio.Event()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(min(ADMISSION_WAIT_S, self._scheduler.max_wait_s)):
                while True:
                    await turn.wait()
                    turn.clear()
                    try:
                        return self._place(spec)
                    except Overloaded as error:
                        refusal = error
        except TimeoutError:
            raise refusal from None
        finally:
            self._waiting.remove(turn)
            self._wake_next()

    def _place(self, spec: SessionSpec) -> DraftState:
        if self._draining:
            raise Unavailable("the draft service is shutting down; use another replica")
        if self._num_held >= self._scheduler.max_num_seqs:
            raise self._crowded()
        state: DraftState = self._drafter.open(spec)
        self._num_held += 1
        return state

    def _crowded(self) -> Overloaded:
        return Overloaded(
            f"{self._num_held} of {self._scheduler.max_num_seqs} draft sessions are open and {len(self._waiting)} of"
            f" {self._scheduler.max_waiting} places to wait are taken: go on without a draft, or retry"
        )

    def _wake_next(self) -> None:
        if self._waiting:
            self._waiting[0].set()
