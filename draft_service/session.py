"""One draft session: the committed prefix, and the proposals for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from draft_service.batcher import DraftBatcher
from draft_service.common_prefix import common_prefix_len
from draft_service.draft_request import DraftRequest, InflightBatch
from draft_service.drafters.base import Draft, Drafter, DraftState
from draft_service.proposal_queue import ProposalQueue
from specdec.errors import Cancelled, InvalidRequest, StaleSession, TandemError
from specdec.tree_shape import TreeShape
from specdec.types import DraftOpened, HiddenStates, Proposal, SessionSpec

#: Proposals that a chain of a stream begins with, beside the tokens that the target passes meanwhile.
FIRST_PROPOSALS: Final = 2


class DraftSessionOwner(Protocol):
    """What a session uses of its service."""

    @property
    def drafter(self) -> Drafter[Any]:
        """What drafts."""
        ...

    @property
    def batcher(self) -> DraftBatcher[Any]:
        """Where sessions submit their requests."""
        ...

    @property
    def tree(self) -> TreeShape | None:
        """The trees to draft; None: chains."""
        ...

    def count_stale(self) -> None:
        """Count a message that came too late or belongs to another opening."""
        ...

    def release(self, session: CoreSession) -> None:
        """Free what a session holds and admit the next one."""
        ...


@dataclass(frozen=True, slots=True)
class Advance:
    """Tokens that were committed after ``base_len``, and what is wanted next."""

    base_len: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    hidden_states: Sequence[HiddenStates] = ()
    #: Tokens that may be drafted after them, as if those drafted before were committed; 0: one proposal.
    stream_tokens: int = 0

    @property
    def committed_len(self) -> int:
        """Committed length after it."""
        return self.base_len + len(self.token_ids)


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise :class:`InvalidRequest` unless every token is in the vocabulary; size 0: any vocabulary."""
    vocab_size = vocab_size or 2**32
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"token_ids holds {wrong}; the draft's tokens are 0 to {vocab_size - 1}", param="token_ids"
        )


class CoreSession:
    """A :class:`~specdec.backends.DraftSession` on the service's drafter. The one home of a session's state.

    ``state`` is what the drafter keeps: the committed tokens and the cache. Nothing changes while a batch uses it.
    Messages that arrive meanwhile are kept and applied in order when the batch has finished; only the newest one is
    answered, and a draft that it has overtaken stops at the next step.

    In a stream what was drafted stands in the state as if it were committed, and drafting goes on after it. Messages
    that agree only move :attr:`committed_len`; others take the drafts back as any tokens are taken back.
    """

    def __init__(self, owner: DraftSessionOwner, spec: SessionSpec, state: DraftState) -> None:
        self._owner = owner
        self.drafter = owner.drafter
        self.state = state
        #: Whom admission counts it for.
        self.client = spec.client
        #: Committed length at which the output is complete.
        self._max_len = 2**62 if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        #: The answer that was asked for and is not there yet.
        self._request: DraftRequest[Any] | None = None
        self._reads_states = bool(owner.drafter.info.hidden_state_layers)
        #: A chain drawn from q passes a ratio rule more often than the chosen siblings of a tree do.
        self._tree = None if spec.draft_sampling.sends_q else owner.tree
        #: Tokens a proposal may have: what the latest message asks for, at most ``opened.num_speculative_tokens``.
        self._num_draft_tokens = 0
        #: Committed tokens it was told; in a stream the state has its own drafts after them.
        self.committed_len = len(spec.token_ids)
        #: Tokens of a stream after the committed ones, at most; 0: there is none. And the number of its chain.
        self._stream_tokens = self._chain = 0
        #: Committed tokens when the chain began.
        self._chain_from = 0
        self._arrived: list[Advance] = []
        self._proposals = ProposalQueue()
        self._closed = False
        self._released = asyncio.Event()
        self._opened = DraftOpened(
            epoch=spec.epoch,
            num_speculative_tokens=min(spec.num_speculative_tokens, owner.drafter.info.num_speculative_tokens),
            num_cached_tokens=owner.drafter.num_cached_tokens(state),
            streams=owner.drafter.streams and not spec.draft_sampling.sends_q,
        )

    @property
    def opened(self) -> DraftOpened:
        """What admission found."""
        return self._opened

    async def prefill(self) -> None:
        """Ingest the tokens of the opening."""
        if not self.state.num_pending:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(outcome: Draft | Exception) -> None:
            self._request = None
            if done.done():
                return
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(None)

        self._submit(DraftRequest(self.state, 0, finish))
        await done

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        hidden_states: Sequence[HiddenStates] = (),
        stream_tokens: int = 0,
    ) -> None:
        """Commit ``token_ids`` after ``base_len`` and ask for a proposal; never waits.

        Tokens known here already are compared: where they disagree, the new ones win and what followed is dropped.
        A message that brings nothing but tokens known here, and fewer, is old: it is counted, changes nothing and gets
        an empty proposal. The proposal is shorter, even empty, at the limits of the request and of the draft's context.
        Calls that were overtaken by a newer one get none. With ``stream_tokens``, where :attr:`opened` says that it
        streams, drafting goes on (:meth:`specdec.backends.DraftSession.advance`).

        :meth:`receive` raises what was wrong with a message: :class:`StaleSession` where there is a gap before it,
        :class:`InvalidRequest` for an unknown token, and for hidden states of positions that are not committed or of
        another width than the drafter's. The session continues without that message.

        Raises:
            StaleSession: the session is closed.
        """
        if self._closed:
            raise StaleSession("the session is closed; open it again")
        states = hidden_states if self._reads_states else ()
        stream_tokens = stream_tokens if self._opened.streams and num_draft_tokens > 0 else 0
        message = Advance(base_len, token_ids, num_draft_tokens, states, stream_tokens)
        if self._confirms(message):
            self.committed_len, self._stream_tokens = message.committed_len, stream_tokens
            self._num_draft_tokens = min(num_draft_tokens, self._opened.num_speculative_tokens)
            if self._request is None:
                self._draft_on()
            return
        self._arrived.append(message)
        batch = self._batch
        if batch is None:
            self._apply_arrived()
            return
        if len(self._arrived) == 1:
            batch.on_finished.append(self._apply_arrived)
        if self._request is not None:
            self._request.cancel()  # what it has overtaken

    async def receive(self) -> Proposal:
        """The next proposal, in the order they were drafted.

        Raises:
            StaleSession: a message did not fit.
            Cancelled: the session is closed.
            TandemError: drafting failed; the session continues.
        """
        return await self._proposals.take()

    def received_more(self) -> list[Proposal]:
        """The proposals that :meth:`receive` would return without waiting; they count as received."""
        return self._proposals.drain()

    def fail(self, error: TandemError) -> None:
        """Nothing can be drafted for the session any more; :meth:`receive` raises ``error``."""
        self._proposals.put(error)

    async def close(self) -> None:
        """Release the cache, as soon as no batch uses it. Idempotent."""
        self.end()
        await self._released.wait()

    def end(self) -> None:
        """What :meth:`close` does, without waiting for it."""
        if self._closed:
            return
        self._closed = True
        self._arrived.clear()
        self._proposals.close()
        batch = self._batch
        if self._request is not None:
            self._request.resolve(Cancelled("the session was closed"))
        self._cancel_request()
        if batch is not None:
            batch.on_finished.append(self._release)
        else:
            self._release()

    def _release(self) -> None:
        self._released.set()
        self._owner.release(self)

    # --- verdicts ---

    @property
    def _batch(self) -> InflightBatch | None:
        """The batch that uses the state."""
        return None if self._request is None else self._request.batch

    def _apply_arrived(self) -> None:
        """Apply all messages that arrived, and answer the newest. No batch uses the state."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        self._cancel_request()
        message = arrived[-1]
        # The edge of the service: k is limited here and nowhere else.
        self._num_draft_tokens = min(message.num_draft_tokens, self._opened.num_speculative_tokens)
        try:
            are_new = [self._commit(message) for message in arrived]
            if len(self.state.token_ids) > self.committed_len:  # drafts of a stream that does not go on
                self.drafter.advance(self.state, self.committed_len, ())
            self._stream_tokens = message.stream_tokens
            if message.stream_tokens:
                self._chain += 1
                self._chain_from = self.committed_len
                self._draft_on()
            elif message.num_draft_tokens > 0:
                self._draft(message, is_old=not are_new[-1])
        except Exception as error:
            self._proposals.put(error)

    def _commit(self, message: Advance) -> bool:
        """Commit what is new in a message; False where all its tokens were known, and more."""
        base_len, token_ids = message.base_len, message.token_ids
        known, length = self.state.token_ids, self.committed_len
        if base_len > length or base_len < 0:
            self._owner.count_stale()
            raise StaleSession(
                f"the message starts at committed length {base_len}, but this draft knows {length} tokens: open the"
                " session again"
            )
        check_tokens(token_ids, self.drafter.info.vocab_size)
        if message.hidden_states and message.hidden_states[-1].end > message.committed_len:
            raise InvalidRequest(
                f"hidden_states reach position {message.hidden_states[-1].end - 1}, but {message.committed_len} tokens"
                " are committed",
                param="hidden_states",
            )
        same = common_prefix_len(known[base_len : base_len + len(token_ids)], token_ids)
        if same == len(token_ids):
            if base_len + same < length:
                self._owner.count_stale()
                return False
            if message.hidden_states:
                self.drafter.advance(self.state, length, (), message.hidden_states)
            self.committed_len = base_len + same
            return True  # the same again, and answered again
        if base_len + same < len(known):  # tokens are taken back, and with them the proposals for them
            self._proposals.clear()
        self.drafter.advance(self.state, base_len + same, token_ids[same:], message.hidden_states)
        self.committed_len = message.committed_len
        return True

    def _confirms(self, message: Advance) -> bool:
        """Whether a message says no more than that drafts of the stream were committed: nothing is interrupted."""
        base_len, end, known = message.base_len, message.committed_len, self.state.token_ids
        return (
            bool(message.stream_tokens and self._stream_tokens and not self._arrived)
            and 0 <= base_len <= self.committed_len <= end <= len(known)
            and list(known[base_len:end]) == list(message.token_ids)
        )

    # --- proposals ---

    def _draft(self, message: Advance, is_old: bool) -> None:
        """Request the proposal that a message asks for."""
        length = message.committed_len
        num_tokens = 0 if is_old else min(self._num_draft_tokens, self._max_depth())
        if num_tokens <= 0:
            self._proposals.put(Proposal(self._opened.epoch, length, ()))
            return
        tree = self._tree
        if tree is not None:  # what limits a chain's length limits a tree's depth
            tree = tree.cut(self._max_depth())
            num_tokens = self._num_draft_tokens
        elif self._owner.tree is not None:  # a chain in place of a tree is as long as that is deep, at most
            num_tokens = min(num_tokens, self._owner.tree.depth)

        def answer(outcome: Draft | Exception) -> None:
            self._request = None
            if isinstance(outcome, Exception):
                self._proposals.put(outcome)
                return
            self._send(outcome, request)

        request = DraftRequest(self.state, num_tokens, answer, tree=tree)
        self._submit(request)

    def _draft_on(self) -> None:
        """Request the next proposal of the stream, if it may be longer.

        A chain begins with what the target passes while it comes and two proposals, and grows by a proposal with each
        of its tokens that is committed: most end soon. Simulated, that is as fast as long ones for trips of 0.7 to 17
        steps, and at 17 a chain begins with 27 tokens in place of 95.
        """
        length, width = len(self.state.token_ids), self._num_draft_tokens + 1
        num_confirmed = self.committed_len - self._chain_from
        ahead = self._stream_tokens // width + FIRST_PROPOSALS * (width - 1) + num_confirmed * width
        room = self.committed_len + min(self._stream_tokens, ahead) - length
        num_tokens = min(self._num_draft_tokens, room, self._max_depth())
        if num_tokens <= 0:
            return

        def answer(outcome: Draft | Exception) -> None:
            self._request = None
            if isinstance(outcome, Exception):
                self._proposals.put(outcome)
            elif outcome.token_ids:
                self._send(outcome, request)
                self.drafter.advance(self.state, length, outcome.token_ids)
                self._draft_on()

        request = DraftRequest(self.state, num_tokens, answer, is_stream=True)
        self._submit(request)

    def _send(self, draft: Draft, request: DraftRequest[Any]) -> None:
        self._proposals.put(
            Proposal(
                epoch=self._opened.epoch,
                base_len=len(self.state.token_ids),
                token_ids=draft.token_ids,
                parents=draft.parents,
                q_rows=draft.q_rows,
                draft_ns=request.draft_ns,
                queue_ns=request.queue_ns,
                chain=self._chain,
            )
        )

    def _max_depth(self) -> int:
        """Tokens that may be drafted in sequence, however many are wanted; 0 and less: none.

        The target adds a token of its own to what it accepts, so the last token of the request need not be drafted.
        """
        return min(self._max_len - len(self.state.token_ids) - 1, self.drafter.room(self.state))

    def _cancel_request(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None

    def _submit(self, request: DraftRequest[Any]) -> None:
        self._request = request
        self._owner.batcher.submit(request)
