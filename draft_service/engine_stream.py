"""The sessions of an engine that decodes all its sequences in one step: one request and one answer a step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from specdec import codec
from specdec.backends import DraftBackend, DraftSession
from specdec.errors import InvalidRequest, Overloaded, StaleSession, TandemError, quote
from specdec.types import Proposal, SessionSpec
from specdec.v1 import draft_service_pb2 as pb

logger = logging.getLogger(__name__)

#: Sessions of one engine at most, those that wait to be admitted included.
MAX_SESSIONS: Final = 4096
#: Seconds without an advance after which a session ends, so that an engine that idles or has forgotten a session does
#: not hold its cache. An engine that comes back later opens it again, for the price of a prefill.
MAX_IDLE_S: Final = 60.0


class EngineStream:
    """All sessions of one engine. Close it in any case."""

    def __init__(self, backend: DraftBackend) -> None:
        self._backend = backend
        self._sessions: dict[str, _EngineSession] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def step(
        self, request: pb.DraftStepRequest, superseded: asyncio.Future[object] | None = None
    ) -> pb.DraftStepResponse:
        """Apply a step's changes; returns once the open sessions asked for proposals have them, the step's time is
        over, or ``superseded`` is done: the engine is past this step.
        """
        lost: dict[str, str] = {}
        for session_id in request.close:
            self._end(session_id)
        for opening in request.open:
            try:
                self._open(codec.decode_open_draft(opening))
            except TandemError as error:
                lost[opening.session_id] = str(error)
        asked = dict.fromkeys(session for each in request.advances if (session := self._advance(each, lost)))
        waiting = [session.answered for session in asked if session.is_open and not session.answered.done()]
        if waiting and request.timeout_ms:
            await _wait(waiting, request.timeout_ms / 1000, superseded)
        response = pb.DraftStepResponse(step=request.step)
        for session in asked:
            if session.answered.done():
                self._answer(session, response, lost)
        response.lost.extend(pb.LostSession(session_id=name, cause=cause) for name, cause in lost.items())
        return response

    async def close(self) -> None:
        """End all sessions."""
        for session_id in list(self._sessions):
            self._end(session_id)
        if self._ending:
            await asyncio.wait(self._ending)

    def _open(self, spec: SessionSpec) -> None:
        if spec.session_id in self._sessions:
            raise InvalidRequest(f"session {quote(spec.session_id)} is open already; choose another name")
        if len(self._sessions) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} sessions are open on this stream; end some")
        name = spec.session_id
        self._sessions[name] = _EngineSession(self._backend, spec, on_idle=lambda: self._end(name))

    def _advance(self, request: pb.SessionAdvance, lost: dict[str, str]) -> _EngineSession | None:
        """Pass an advance on; the session, if it asks for a proposal."""
        session = self._sessions.get(request.session_id)
        if session is None:
            lost.setdefault(request.session_id, "no session of this name is open")
            return None
        session.advance(request.advance)
        return session if request.advance.num_draft_tokens else None

    def _answer(self, session: _EngineSession, response: pb.DraftStepResponse, lost: dict[str, str]) -> None:
        answer = session.answered.result()
        if isinstance(answer, Proposal):
            response.proposals.add(session_id=session.name, proposal=codec.encode_proposal(answer))
        else:
            lost.setdefault(session.name, str(answer))
            self._end(session.name)

    def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            task = asyncio.create_task(session.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)


class _EngineSession:
    """One session, opened in the background."""

    def __init__(self, backend: DraftBackend, spec: SessionSpec, on_idle: Callable[[], None]) -> None:
        """``on_idle`` is called after :data:`MAX_IDLE_S` without an advance."""
        self.name = spec.session_id
        #: Whether it is prefilled; no step waits for it before.
        self.is_open = False
        self._on_idle = on_idle
        self._expiry = asyncio.get_running_loop().call_later(MAX_IDLE_S, on_idle)
        self._token_ids = list(spec.token_ids)
        #: The last advance, and whether the backend does not know it yet.
        self._last: pb.Advance | None = None
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        #: The proposal that continues the committed tokens, or why there will be none.
        self.answered: asyncio.Future[Proposal | Exception] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(backend, spec), name="engine-session")

    def advance(self, message: pb.Advance) -> None:
        """Commit tokens and ask for a proposal: :attr:`answered` is a new one."""
        loop = asyncio.get_running_loop()
        self._expiry.cancel()
        self._expiry = loop.call_later(MAX_IDLE_S, self._on_idle)
        self.answered = loop.create_future()
        known = len(self._token_ids)
        if message.base_len > known:
            self._error = StaleSession(f"the advance begins at {message.base_len}; {known} tokens are known")
        else:
            token_ids = tuple(message.token_ids)[known - message.base_len :]
            self._token_ids += token_ids
            self._last = message
            self._changed.set()
        if self._error is not None:
            self._answer(self._error)

    async def close(self) -> None:
        """Release what it holds."""
        self._expiry.cancel()
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    async def _run(self, backend: DraftBackend, spec: SessionSpec) -> None:
        try:
            session = await backend.open(spec)
            self.is_open = True
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pass_on(session, len(spec.token_ids)))
                    tasks.create_task(self._receive(session))
            finally:
                await session.close()
        except* TandemError as errors:
            self._error = errors.exceptions[0]
        except* Exception as errors:
            logger.exception("a session of an engine failed unexpectedly")
            self._error = errors.exceptions[0]
        assert self._error is not None, "it ends by an error alone"
        self._answer(self._error)

    async def _pass_on(self, session: DraftSession, num_sent: int) -> None:
        """Tell the backend, which knows ``num_sent`` tokens, what is committed. While it opens, the advances of several
        steps become one.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            message, num_known, num_sent = self._last, num_sent, len(self._token_ids)
            assert message is not None
            await session.advance(num_known, self._token_ids[num_known:], message.num_draft_tokens)

    async def _receive(self, session: DraftSession) -> None:
        while True:
            proposal = await session.receive()
            if proposal.base_len == len(self._token_ids):
                self._answer(proposal)

    def _answer(self, answer: Proposal | Exception) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)


async def _wait(
    answers: Sequence[asyncio.Future[Proposal | Exception]],
    timeout_s: float,
    superseded: asyncio.Future[object] | None,
) -> None:
    """Wait for all answers; no longer than ``timeout_s``, and not once ``superseded`` is done."""
    waiting = asyncio.ensure_future(asyncio.wait(answers))
    try:
        first = (waiting,) if superseded is None else (waiting, superseded)
        await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
