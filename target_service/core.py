"""The target in one process: opens sessions, batches them, and counts what it holds. Needs no gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

from engine.device_thread import DeviceThread
from engine.engine import Engine
from engine.hidden_states import STATE_DTYPE
from engine.kv_sequence import KVSequence
from engine.loading.memory import LargestStep
from engine.parallel.ranks import Place
from engine.sampling.state import SamplingState
from engine.state_map import StateMap
from specdec.errors import InternalError, Unavailable
from specdec.hidden_state_buffer import MAX_BYTES
from specdec.process.lifecycle import finish
from specdec.process.tasks import call_each, log_failure
from specdec.scheduling.admission import Admission
from specdec.settings import TargetSettings
from specdec.types import HiddenStates, ModelInfo, ServerLoad, SessionSpec
from specdec.v1.types_pb2 import StateMapPart
from target_service.grammar.compiler import GrammarCompiler
from target_service.grammar.tokenizer import read_tokenizer
from target_service.rank_processes import OnLoss, load
from target_service.scheduler.batcher import Deliver, Follow, StepBatcher
from target_service.sequence_memory import SequenceMemory
from target_service.session.opening import may_reuse
from target_service.session.session import Session
from target_service.session.throughput import Throughput
from target_service.spec_check import check_spec, kv_share
from target_service.state_map_intake import StateMapIntake, read_state_maps
from target_service.state_maps import StateMaps
from target_service.step import ScheduledSequence, StepResult, StepSession, run_steps
from target_service.stop_criteria import StopCriteria
from target_service.verification.verifier import Verifier, decide_many

logger = logging.getLogger(__name__)

GOING_DOWN: Final = "the target is shutting down; use another replica"

#: A step of rounds runs on the event loop if the latest one of as many rows took less than this, in nanoseconds. That
#: saves two hand-overs between threads: with the processes of ``tandem serve`` on two cores a round of four drafted
#: tokens takes 0.93 of the time at one session and 0.99 at eight (one way in every other second). Messages wait for the
#: event loop meanwhile; in longer steps they would wait for longer than a hand-over takes.
MAX_INLINE_NS: Final = 4_000_000


class TargetCore:
    """Implements :class:`specdec.backends.TargetBackend`. Made on a running event loop, used from it alone."""

    #: What :meth:`start` has decide rounds; only a measurement has another.
    verifier_class: ClassVar[type[Verifier]] = Verifier

    def __init__(
        self,
        engine: Engine,
        device: DeviceThread,
        settings: TargetSettings,
        verifier: Verifier,
        state_maps: Mapping[str, StateMap] | None = None,
    ) -> None:
        """``engine`` and ``verifier`` are warm; the core owns them, and the engine's thread, from now on. Others may
        read the engine. ``state_maps``: first layers of draft heads by their fingerprints, on the engine's device.
        """
        scheduler = settings.scheduler
        self.engine = engine
        self._device = device
        self._settings = settings
        self._state_maps = StateMaps(state_maps or {}, settings.max_state_map_bytes)
        self._intake = StateMapIntake(self._state_maps, engine, device, settings)
        self._verifier = verifier
        #: The blocks of the sessions.
        self.memory = SequenceMemory(engine.pool)
        self._batcher = StepBatcher(self._run_steps, scheduler.max_num_batched_tokens, self.memory, self._fail)
        self._admission: Admission[KVSequence] = Admission(
            max_open=scheduler.max_num_seqs,
            max_waiting=scheduler.max_waiting,
            max_wait_s=scheduler.max_wait_s,
            undo=self.memory.release,
            describe=self._describe,
        )
        self.memory.on_all_back = self._admission.admit_next
        self._info = replace(engine.info, verification=settings.verification)
        self._grammars = GrammarCompiler(
            partial(read_tokenizer, settings.model, engine.info), settings.scheduler.max_waiting
        )
        self._sessions: set[Session] = set()
        self._throughput = Throughput()
        self._draining = False
        self.failure: InternalError | None = None
        self.failed = asyncio.Event()
        self._num_stale = 0
        self._num_superseded = 0
        #: Nanoseconds of the latest step by its rows.
        self._step_ns: dict[int, int] = {}
        ranks = engine.ranks
        self._heartbeats: asyncio.Task[None] | None = None
        if ranks is not None:
            self._heartbeats = asyncio.create_task(self._send_heartbeats(ranks.heartbeat_s), name="heartbeats")
            self._heartbeats.add_done_callback(log_failure)

    @classmethod
    async def start(
        cls, settings: TargetSettings, place: Place | None = None, on_loss: OnLoss = logger.error
    ) -> TargetCore:
        """Load the model and warm it up.

        ``place`` is that of rank 0 where others than this process start the ranks of a split model. ``on_loss`` is
        called, on any thread, when one of them is lost; every step fails from then on.

        Raises:
            ModelNotSupported: the model would give wrong answers here, or cannot run.
            InvalidRequest: a setting does not fit the model or the machine.
            Unavailable: a rank of a split model ends.
        """
        device = DeviceThread("target-device")
        largest = LargestStep(settings.scheduler.max_num_batched_tokens, decide_many)
        loading = asyncio.create_task(device.run(load, settings.model, place, on_loss, largest))
        try:
            engine = await asyncio.shield(loading)
            await device.run(engine.warm_up)
            verifier = cls.verifier_class(num_threads=engine.num_threads)
            sizes, captures = (engine.info.vocab_size, engine.info.tokenizer_size), not settings.model.enforce_eager
            await device.run(verifier.warm_up, engine.device, *sizes, captures=captures)
            state_maps = await device.run(read_state_maps, settings, engine)
        except BaseException:
            await finish(_undo_start(device, loading))
            raise
        return cls(engine, device, settings, verifier, state_maps)

    async def open(
        self,
        spec: SessionSpec,
        on_states: Callable[[HiddenStates], None] | None = None,
        on_admitted: Callable[[Session], None] | None = None,
    ) -> Session:
        """Admit a session and prefill it; returns once the first token is there. Cancelling leaves nothing behind.

        ``on_states`` gets the hidden states of a long prompt as they are computed; the first verdict then carries the
        last ones alone. ``on_admitted`` gets the session before its prompt is fed.

        Raises:
            InvalidRequest: the spec does not fit the model.
            Overloaded: there was no place or memory for too long, or too many are waiting.
            Unavailable: the target is shutting down.
            InternalError: an unexpected error has ended it.
        """
        asked_ns = time.perf_counter_ns()
        if self._draining:
            raise self.failure or Unavailable(GOING_DOWN)
        if spec.hidden_state_layers:
            layers = self.engine.check_state_layers(spec.hidden_state_layers)
            spec = replace(spec, hidden_state_layers=layers)
        stop_criteria = check_spec(spec, self._info, self.engine.pool)
        state = SamplingState(
            spec.params,
            spec.token_ids,
            spec.prompt_len,
            self._info.vocab_size,
            tokenizer_size=self._info.tokenizer_size or None,
            device=self.engine.device,
        )
        wanted = spec.params.structured_outputs
        grammar = None
        if wanted is not None:
            grammar = await self._grammars.compile(wanted, spec.token_ids[spec.prompt_len :])
            if self._draining:
                raise self.failure or Unavailable(GOING_DOWN)
        max_entries = self._max_entries(stop_criteria)
        sequence = await self._admission.admit(partial(self._reserve, spec, max_entries), client=spec.client)
        rule = spec.rule or self._settings.verification
        first_state, state_map = self._first_state(spec), self._state_maps.find(spec.hidden_state_map)
        step_session = StepSession(
            spec, state, sequence, rule, stop_criteria, grammar, first_state, state_map, max_entries
        )
        wants_map = self._state_maps.wants(spec.hidden_state_map)
        throughput = self._throughput.of_group(spec.pacing_group)
        session = Session(
            step_session, self.engine.pool, self, asked_ns, throughput, on_states=on_states, wants_state_map=wants_map
        )
        self.memory.belongs_to(sequence, session)
        self._sessions.add(session)
        try:
            if on_admitted is not None:
                on_admitted(session)
            await session.start()
        except BaseException:
            session.end()
            raise
        return session

    async def put_state_map(self, parts: AsyncIterator[StateMapPart]) -> None:
        """See :class:`specdec.backends.StateMapTaker`. Sessions that are open go on without it."""
        await self._intake.take(parts, lambda: {session.spec.hidden_state_map for session in self._sessions})

    async def info(self) -> ModelInfo:
        """Describe the model."""
        return self._info

    async def load(self) -> ServerLoad:
        """Describe the occupancy at this moment."""
        pool = self.engine.pool
        return ServerLoad(
            open_sessions=self._admission.num_open,
            waiting_sessions=self._admission.num_waiting,
            used_blocks=pool.used_blocks,
            cached_blocks=pool.cached_blocks,
            total_blocks=pool.total_blocks,
            stale_messages=self._num_stale,
            num_batches=self._batcher.num_steps,
            busy_ns=self._batcher.busy_ns,
            superseded_proposals=self._num_superseded,
            preemptions=self.memory.num_preemptions,
        )

    @property
    def num_open(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def num_going_on(self) -> int:
        """Sessions whose verdicts come without being asked for, in the newest step."""
        return self._batcher.num_going_on

    @property
    def num_steps(self) -> int:
        """Forward passes since the start."""
        return self._batcher.num_steps

    def drain(self) -> None:
        """Open no new sessions; open ones continue."""
        self._draining = True

    async def close(self) -> None:
        """End every session, let the running step finish, and drop the model. Idempotent."""
        self._draining = True
        self._grammars.close()
        self._admission.refuse(Unavailable(GOING_DOWN))
        for session in list(self._sessions):
            session.fail(Unavailable(GOING_DOWN))
            session.end()
        await self._batcher.close()
        if self._heartbeats is not None:
            self._heartbeats.cancel()
        self._verifier.close()
        try:
            await self._device.run(self.engine.close)
        except Unavailable:  # closed before
            return
        await asyncio.to_thread(self._device.close)

    # --- for sessions; see session.SessionOwner ---

    def ready(self, session: Session) -> None:
        """Hand a session that has tokens to feed to the batcher."""
        if self.failure is not None:
            session.fail(self.failure)
        else:
            self._batcher.add(session)

    def count_stale(self) -> None:
        """Count a dropped message that did not fit its session's state."""
        self._num_stale += 1

    def count_superseded(self, count: int = 1) -> None:
        """Count proposals that were dropped because multi-step decode had gone on."""
        self._num_superseded += count

    def finish(self, session: Session) -> None:
        """Give back the cache of a session that has ended; its client may be slow to close it."""
        step_session = session.step_session
        token_ids = () if session.has_failed else step_session.state.token_ids
        self.memory.release(step_session.sequence, token_ids)
        self._admission.admit_next()

    def release(self, session: Session) -> None:
        """Give back a session's cache and let the next one in."""
        self._sessions.discard(session)
        self._batcher.forget(session)
        self.finish(session)
        self._admission.leave(session.spec.client)

    # --- inside ---

    def _fail(self, error: InternalError) -> None:
        """No step runs any more: end every session, and open no new ones."""
        self.failure = error
        self.failed.set()
        self.drain()
        self._admission.refuse(error)
        call_each([partial(session.crash, error) for session in self._sessions])

    async def _send_heartbeats(self, pause_s: float) -> None:
        """Tell the other ranks now and then that this one is there, until they are lost."""
        with suppress(Unavailable):
            while True:
                await asyncio.sleep(pause_s)
                await self._device.run(self.engine.send_heartbeat)

    async def _run_steps(self, parts: Sequence[ScheduledSequence], follow: Follow, deliver: Deliver) -> StepResult:
        loop = asyncio.get_running_loop()

        def pass_on(result: StepResult) -> None:
            loop.call_soon_threadsafe(deliver, result)

        work = partial(run_steps, self.engine, self._verifier, parts, follow, pass_on)
        result = work() if self._is_short(parts) else await self._device.run(work)
        timings = result.timings
        self._step_ns[timings.batch_rows] = timings.forward_ns + timings.verify_ns
        return result

    def _is_short(self, parts: Sequence[ScheduledSequence]) -> bool:
        """Whether a step should not block the event loop for long. No other step follows one with a round."""
        if not self.engine.runner.brings_threads or not any(part.is_round for part in parts):
            return False
        return 0 < self._step_ns.get(sum(len(part.token_ids) for part in parts), 0) < MAX_INLINE_NS

    def _max_entries(self, stop_criteria: StopCriteria) -> int:
        """Entries of a sequence at most. What is left of the last block serves the siblings of trees."""
        pool = self.engine.pool
        return pool.blocks_for(stop_criteria.max_len - 1) * pool.block_size

    def _reserve(self, spec: SessionSpec, max_entries: int) -> KVSequence:
        """A sequence for the session's prompt."""
        is_shared = self._settings.scheduler.enable_prefix_caching
        return self.memory.admit(
            spec.token_ids,
            len(spec.token_ids) - 1 if may_reuse(spec) else 0,
            max_entries,
            scope=(spec.owner, spec.cache_salt) if is_shared else None,
            client=spec.client,
            client_limit=kv_share(spec, self.engine.pool.total_blocks),
        )

    def _first_state(self, spec: SessionSpec) -> int:
        """The first position of the prompt whose hidden states are kept: as many as there is room for, or the last."""
        num_features = len(spec.hidden_state_layers) * self.engine.hidden_size
        is_alone = spec.last_hidden_state_only or not num_features
        num_positions = 1 if is_alone else max(1, MAX_BYTES // (num_features * STATE_DTYPE.itemsize))
        return max(0, len(spec.token_ids) - num_positions)

    def _describe(self) -> str:
        pool, scheduler = self.engine.pool, self._settings.scheduler
        return (
            f"the target is full: {self._admission.num_open} of {scheduler.max_num_seqs} sessions open,"
            f" {pool.used_blocks} of {pool.total_blocks} KV blocks in use"
        )


async def _undo_start(device: DeviceThread, loading: asyncio.Task[Engine]) -> None:
    """End what a start that failed or was cancelled has loaded."""
    await asyncio.wait((loading,))
    if not loading.cancelled() and loading.exception() is None:
        await device.run(loading.result().close)
    await asyncio.to_thread(device.close)
