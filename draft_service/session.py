"""One draft session: the committed prefix, and the proposals on their way to the gateway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draft_service.batcher import Wish
from draft_service.drafter import Draft, DraftState
from specdec.errors import Cancelled, StaleSession
from specdec.sessions import DraftOpened, Proposal, SessionSpec

if TYPE_CHECKING:
    from draft_service.core import DraftCore


@dataclass(frozen=True, slots=True)
class Advance:
    """Tokens that were committed after ``base_len``, and what is wanted next."""

    base_len: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    num_ahead: int

    @property
    def committed_len(self) -> int:
        """Committed length after it."""
        return self.base_len + len(self.token_ids)


class CoreSession:
    """A :class:`~specdec.sessions.DraftSession` on the core's drafter.

    Nothing changes while the session's state is in the drafter's hands: what arrives meanwhile is kept and taken in
    at once when the batch ends, in order; only the newest message is worked on.
    """

    def __init__(self, core: DraftCore, spec: SessionSpec, state: DraftState) -> None:
        self._core = core
        self._state = state
        self._park_as = spec.session_id if spec.park else None
        #: Committed length at which the output is complete.
        self._max_len = 2**62 if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        self._wish: Wish[Any] | None = None
        self._arrived: list[Advance] = []
        self._outbox = Outbox()
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

    async def advance(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int, num_ahead: int = 0) -> None:
        """Commit ``token_ids`` after ``base_len`` and ask for a proposal; never waits.

        Tokens known here already are compared: where they disagree, the new ones win and what followed is dropped.
        A message that brings nothing but tokens known here, and fewer, is old: it is counted, changes nothing and gets
        an empty proposal. The proposal is shorter, even empty, at the limits of the request and of the draft's context.
        Calls that were overtaken by a newer one get none.

        :meth:`receive` raises what was wrong with a message: :class:`StaleSession` where there is a gap before it,
        :class:`InvalidRequest` for an unknown token. The session goes on without that message.

        Raises:
            StaleSession: the session is closed.
        """
        if self._closed:
            raise StaleSession("the session is closed; open it anew")
        self._arrived.append(Advance(base_len, token_ids, num_draft_tokens, num_ahead))
        wish = self._wish
        if wish is not None and wish.running:
            if len(self._arrived) == 1:
                wish.on_idle.append(self._take_in)
        else:
            self._take_in()

    async def receive(self) -> Proposal:
        """The next proposal, in the order they were drafted.

        Raises:
            StaleSession: a message did not fit, or the session is closed.
            Cancelled: the session was closed meanwhile.
            TandemError: drafting failed; the session goes on.
        """
        return await self._outbox.take()

    async def propose(self, base_len: int, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """:meth:`advance`, then the first proposal for the tokens committed by it."""
        await self.advance(base_len, token_ids, num_draft_tokens)
        if num_draft_tokens <= 0:
            return Proposal(self._opened.epoch, base_len + len(token_ids), ())
        while True:
            proposal = await self.receive()
            if proposal.committed_len == base_len + len(token_ids):
                return proposal

    async def close(self) -> None:
        """Release or park the cache, once it is not in use any more. Idempotent."""
        if not self._closed:
            self._closed = True
            self._arrived.clear()
            self._outbox.close()
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

    def _take_in(self) -> None:
        """Apply all that arrived; the newest message decides what is drafted. The state is idle."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        if self._wish is not None:
            self._wish.done.cancel()  # overtaken, unless it is done
            self._wish = None
        try:
            for message in arrived:
                is_current = self._commit(message)
        except Exception as error:
            self._outbox.put(error)
            return
        if message.num_draft_tokens > 0:
            self._draft(message, is_current)

    def _commit(self, message: Advance) -> bool:
        """Commit what is new in a message; False where it is old."""
        base_len, token_ids = message.base_len, message.token_ids
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
            if base_len + agreeing < length:
                self._outbox.clear()  # proposals for tokens that are taken back now
            self._core.drafter.advance(self._state, base_len + agreeing, token_ids[agreeing:])
        elif base_len + agreeing < length:
            self._core.count_stale()
            return False
        return True

    def _draft(self, message: Advance, is_current: bool) -> None:
        """Wish for the proposal that a message asks for."""
        length = message.committed_len
        # The target adds a token of its own to what it accepts: the last one need not be drafted.
        useful = min(message.num_draft_tokens, self._opened.num_speculative_tokens, self._max_len - length - 1)
        num_tokens = min(useful, self._core.drafter.room(self._state)) if is_current else 0
        if num_tokens <= 0:
            self._outbox.put(Proposal(self._opened.epoch, length, ()))
            return
        wish = self._submit(num_tokens)

        def answer(done: asyncio.Future[Draft]) -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                self._outbox.put(error)
                return
            draft = done.result()
            self._outbox.put(
                Proposal(
                    epoch=self._opened.epoch,
                    base_len=length,
                    token_ids=draft.token_ids,
                    q_rows=draft.q_rows,
                    draft_ns=wish.draft_ns,
                    queue_ns=wish.queue_ns,
                )
            )

        wish.done.add_done_callback(answer)

    def _submit(self, num_tokens: int) -> Wish[Any]:
        self._wish = wish = self._core.batcher.submit(self._state, num_tokens)
        return wish


class Outbox:
    """Proposals and errors in order, for one reader."""

    def __init__(self) -> None:
        self._waiting: deque[Proposal | BaseException] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, item: Proposal | BaseException) -> None:
        """Add one; dropped where nobody will read it any more."""
        if not self._closed:
            self._waiting.append(item)
            self._wake()

    def clear(self) -> None:
        """Forget the proposals that wait."""
        self._waiting = deque(item for item in self._waiting if not isinstance(item, Proposal))

    def close(self) -> None:
        """Drop what waits; :meth:`take` raises from now on."""
        self._closed = True
        self._waiting.clear()
        self._wake()

    async def take(self) -> Proposal:
        """The next proposal; an error that comes before it is raised."""
        if self._closed:
            raise StaleSession("the session is closed; open it anew")
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
            if self._closed:
                raise Cancelled("the session was closed")
        item = self._waiting.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
