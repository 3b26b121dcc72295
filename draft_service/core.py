"""The draft service in one process: its drafter, its sessions and their admission. The servicer puts gRPC around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, Self

from draft_service.batcher import DraftBatcher
from draft_service.drafters.base import Drafter, DraftState
from draft_service.drafters.registry import load_drafter
from draft_service.session import CoreSession, check_tokens
from specdec.errors import InternalError, InvalidRequest, NotFound, Unavailable, quote
from specdec.hidden_state_buffer import PIECE_BYTES
from specdec.process.tasks import call_each
from specdec.scheduling.admission import Admission
from specdec.settings import DraftSettings, SchedulerSettings
from specdec.tree_shape import TreeShape
from specdec.types import ModelInfo, ServerLoad, SessionSpec
from specdec.v1.types_pb2 import StateMapPart

#: Seconds a session may wait for others to end: long enough for streams that close at this moment. A session without a
#: draft is only slower; one that waits for a draft has not started.
ADMISSION_WAIT_S: Final = 0.25


class DraftCore:
    """A :class:`~specdec.backends.DraftBackend` on a drafter. All methods run on one event loop."""

    def __init__(self, drafter: Drafter[Any], scheduler: SchedulerSettings, tree: TreeShape | None = None) -> None:
        """``tree``: what sessions have drafted; None: chains."""
        self.drafter = drafter
        self.tree = tree
        self._max_num_seqs = scheduler.max_num_seqs
        self._sessions: set[CoreSession] = set()
        self.batcher: DraftBatcher[Any] = DraftBatcher(drafter, scheduler.max_num_batched_tokens, fail=self._fail)
        self._admission: Admission[DraftState] = Admission(
            max_open=scheduler.max_num_seqs,
            max_waiting=scheduler.max_waiting,
            max_wait_s=min(ADMISSION_WAIT_S, scheduler.max_wait_s),
            undo=drafter.close,
            describe=self._occupancy,
        )
        self._num_stale = 0
        self._draining = False
        #: Called when the service stops, to end what it should not wait for.
        self.on_drain: set[Callable[[], None]] = set()
        self.failure: InternalError | None = None
        self.failed = asyncio.Event()

    @classmethod
    async def start(cls, settings: DraftSettings) -> Self:
        """Load and warm up the drafter the settings name.

        Raises:
            ModelNotSupported: the checkpoint cannot be run correctly.
            InvalidRequest: a setting does not fit the model or the machine.
        """
        speculative = settings.speculative
        drafter = await load_drafter(settings)
        tree = speculative.tree if speculative.needs_model else None
        return cls(drafter, settings.scheduler, tree)

    async def open(self, spec: SessionSpec) -> CoreSession:
        """Admit a session and prefill its tokens.

        Raises:
            Overloaded: no place or memory, now and within the next moment.
            InvalidRequest: the tokens or parameters do not fit the model.
            Unavailable: the service is shutting down.
            InternalError: an unexpected error has ended it.
        """
        self._check(spec)
        state = await self._admission.admit(lambda: self._reserve(spec), client=spec.client)
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
        return self.drafter.info

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        blocks = self.drafter.occupancy()
        return ServerLoad(
            open_sessions=self._admission.num_open,
            waiting_sessions=self._admission.num_waiting,
            used_blocks=blocks.used,
            cached_blocks=blocks.cached,
            total_blocks=blocks.total,
            stale_messages=self._num_stale,
            num_batches=self.batcher.num_batches,
            busy_ns=self.batcher.busy_ns,
        )

    async def state_map(self, fingerprint: str) -> AsyncIterator[StateMapPart]:
        """See :class:`specdec.backends.StateMapSource`."""
        if not fingerprint or fingerprint != self.drafter.info.hidden_state_map:
            raise NotFound(f"the draft has no first layer {quote(fingerprint)}; its head was replaced")
        data = await self.drafter.read_state_map()
        for start in range(0, len(data), PIECE_BYTES):
            part = StateMapPart(data=data[start : start + PIECE_BYTES])
            if not start:
                part.fingerprint, part.num_bytes = fingerprint, len(data)
            yield part

    def drain(self) -> None:
        """Open no new sessions; open ones continue, but for those of :attr:`on_drain`."""
        self._draining = True
        self._admission.refuse(shutting_down())
        call_each([*self.on_drain])

    async def close(self) -> None:
        """End all sessions, then the drafter. Idempotent."""
        self.drain()
        await self.batcher.close()
        for session in tuple(self._sessions):
            await session.close()
        await self.drafter.shutdown()

    def count_stale(self) -> None:
        """Count a message that came too late or belongs to another opening."""
        self._num_stale += 1

    def release(self, session: CoreSession) -> None:
        """Free what a session holds and admit the next one."""
        self._sessions.discard(session)
        self.drafter.close(session.state)
        self._admission.leave(session.client)

    def _fail(self, error: InternalError) -> None:
        """Nothing is drafted any more: end every session, and open no new ones."""
        self.failure = error
        self.failed.set()
        self._draining = True
        self._admission.refuse(error)
        call_each([partial(session.fail, error) for session in self._sessions])

    def _check(self, spec: SessionSpec) -> None:
        if self._draining:
            raise self.failure or shutting_down()
        if not 1 <= spec.prompt_len <= len(spec.token_ids):
            raise InvalidRequest(
                f"prompt_len is {spec.prompt_len}, outside [1, {len(spec.token_ids)}], the number of token_ids",
                param="prompt_len",
            )
        check_tokens(spec.token_ids, self.drafter.info.vocab_size)

    def _reserve(self, spec: SessionSpec) -> DraftState:
        state: DraftState = self.drafter.open(spec)
        return state

    def _occupancy(self) -> str:
        blocks = self.drafter.occupancy()
        in_use = f", {blocks.used} of {blocks.total} KV blocks are in use" if blocks.total else ""
        return f"{self._admission.num_open} of {self._max_num_seqs} draft sessions are open{in_use}"


def shutting_down() -> Unavailable:
    """What ends or refuses a session of a service that stops."""
    return Unavailable("the draft service is shutting down; use another replica")
