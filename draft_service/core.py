"""Draft sessions in one process: admission, the committed prefix, proposals. The servicer puts gRPC around it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Self

from draft_service.batcher import Batcher, Wish
from draft_service.drafter import Draft, Drafter, DraftState
from draft_service.ngram import NgramDrafter
from draft_service.none import NoDrafter
from specdec.errors import Cancelled, InvalidRequest, Overloaded, StaleSession, Unavailable
from specdec.sessions import DraftOpened, ModelInfo, Proposal, ServerLoad, SessionSpec
from specdec.settings import DraftSettings, SchedulerSettings

#: Seconds a session may wait for others to end. Just long enough for streams that are closing at this moment: a
#: session without a draft is only slower, one that waits for a draft does not even begin to be fast.
ADMISSION_WAIT_S: Final = 0.25


async def load_drafter(settings: DraftSettings) -> Drafter[Any]:
    """The drafter that ``settings.speculative.method`` names. Only one with a model imports torch."""
    speculative = settings.speculative
    if speculative.method == "ngram":
        return NgramDrafter(speculative)
    if speculative.method == "none":
        return NoDrafter()
    from draft_service.draft_model import ModelDrafter  # noqa: PLC0415 (torch)

    return await ModelDrafter.load(settings)


class DraftCore:
    """A :class:`~specdec.sessions.DraftBackend` on a drafter. All methods run on one event loop."""

    def __init__(self, drafter: Drafter[Any], scheduler: SchedulerSettings) -> None:
        self._drafter = drafter
        self._scheduler = scheduler
        self._batcher: Batcher[Any] = Batcher(drafter, scheduler.max_num_batched_tokens)
        self._sessions: set[CoreSession] = set()
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
        return cls(await load_drafter(settings), settings.scheduler)

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
        return ServerLoad(
            open_sessions=self._num_held,
            parked_sessions=parked,
            waiting_sessions=len(self._waiting),
            used_blocks=used,
            total_blocks=total,
            stale_messages=self._num_stale,
            num_batches=self._batcher.num_batches,
            busy_ns=self._batcher.busy_ns,
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


class CoreSession:
    """One open session. Calls are made one at a time; a cancelled call leaves the session as good as before."""

    def __init__(self, core: DraftCore, spec: SessionSpec, state: DraftState) -> None:
        self._core = core
        self._state = state
        self._park_as = spec.session_id if spec.park else None
        #: Committed length at which the output is complete.
        self._max_len = 2**62 if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        self._wish: Wish[Any] | None = None
        self._closed = False
        self._released = asyncio.Event()
        self._opened = DraftOpened(
            epoch=spec.epoch,
            num_speculative_tokens=min(spec.num_speculative_tokens, core.drafter.info.num_speculative_tokens),
            num_cached_tokens=state.num_cached_tokens,
        )

    @property
    def opened(self) -> DraftOpened:
        """What admission found."""
        return self._opened

    @property
    def committed_len(self) -> int:
        """Committed tokens known here."""
        return len(self._state.token_ids)

    async def prefill(self) -> None:
        """Take in the tokens of the opening."""
        if self._state.num_pending:
            await self._submit(0).done

    async def propose(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Commit ``token_ids`` after ``base_len`` and draft after them; see :meth:`advance` for the rules.

        The proposal is shorter, even empty, at the limits of the request and of the draft's context, and empty for a
        message that is older than what is committed here.
        """
        current = await self.advance(base_len, token_ids)
        length = base_len + len(token_ids)
        # The target adds a token of its own to what it accepts: the last one need not be drafted.
        useful = min(num_draft_tokens, self._opened.num_speculative_tokens, self._max_len - length - 1)
        num_tokens = min(useful, self._core.drafter.room(self._state)) if current else 0
        if num_tokens <= 0:
            return Proposal(self._opened.epoch, length, ())
        wish = self._submit(num_tokens)
        draft = await wish.done
        return Proposal(
            epoch=self._opened.epoch,
            base_len=length,
            token_ids=draft.token_ids,
            q_rows=draft.q_rows,
            draft_ns=wish.draft_ns,
            queue_ns=wish.queue_ns,
        )

    async def advance(self, base_len: int, token_ids: Sequence[int]) -> bool:
        """Commit ``token_ids`` after ``base_len``; sending it twice changes nothing.

        Tokens known here already are compared: where they disagree, the new ones win and what followed is dropped.
        False where all of them are known and more: the message is old, it is counted and changes nothing.

        Raises:
            StaleSession: there is a gap, or the session is closed.
            InvalidRequest: a token is unknown.
        """
        await self._settled()
        known = self._state.token_ids
        length = len(known)
        if base_len > length or base_len < 0:
            self._core.count_stale()
            raise StaleSession(
                f"the message starts at committed length {base_len}, but this draft knows {length} tokens: open the"
                " session anew"
            )
        self._core.check_tokens(token_ids)
        overlap = min(len(token_ids), length - base_len)
        agreeing = 0
        while agreeing < overlap and known[base_len + agreeing] == token_ids[agreeing]:
            agreeing += 1
        if agreeing < len(token_ids):
            self._core.drafter.advance(self._state, base_len + agreeing, token_ids[agreeing:])
        elif base_len + agreeing < length:
            self._core.count_stale()
            return False
        return True

    async def close(self) -> None:
        """Release or park the cache, once it is not in use any more. Idempotent."""
        if not self._closed:
            self._closed = True
            wish = self._wish
            if wish is not None and not wish.done.done():
                wish.done.set_exception(Cancelled("the session was closed"))
                wish.done.exception()  # it need not have a listener
            if wish is not None and wish.running:
                wish.on_idle.append(self._release)
            else:
                self._release()
        await self._released.wait()

    def _release(self) -> None:
        self._released.set()
        self._core.release(self, self._state, self._park_as)

    def _submit(self, num_tokens: int) -> Wish[Any]:
        self._wish = wish = self._core.batcher.submit(self._state, num_tokens)
        return wish

    async def _settled(self) -> None:
        """Wait until nothing of an earlier call, cancelled or overtaken, is under way."""
        wish = self._wish
        if wish is not None:
            if wish.running:
                idle = asyncio.Event()
                wish.on_idle.append(idle.set)
                await idle.wait()
            if not wish.done.done():
                wish.done.set_result(Draft())
            self._wish = None
        if self._closed:
            raise StaleSession("the session is closed; open it anew")
