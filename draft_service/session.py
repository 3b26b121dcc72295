"""One draft session: the committed prefix, and the proposals on their way to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any

from draft_service.ahead.acceptance_stats import NUM_GUESSES, SessionOdds
from draft_service.ahead.verdict_tree import Hypothesis, VerdictTree
from draft_service.batcher import DraftRequest, InflightBatch
from draft_service.drafters.base import Draft, DraftState
from draft_service.prefixes import common_prefix_len
from draft_service.proposal_queue import ProposalQueue
from specdec.errors import Cancelled, InvalidRequest, StaleSession
from specdec.types import DraftOpened, HiddenStates, Proposal, SessionSpec

if TYPE_CHECKING:
    from draft_service.core import DraftCore


@dataclass(frozen=True, slots=True)
class Advance:
    """Tokens that were committed after ``base_len``, and what is wanted next."""

    base_len: int
    token_ids: Sequence[int]
    num_draft_tokens: int
    num_ahead_proposals: int
    hidden_states: Sequence[HiddenStates] = ()

    @property
    def committed_len(self) -> int:
        """Committed length after it."""
        return self.base_len + len(self.token_ids)


class News(Enum):
    """What a message brought."""

    NEW = auto()
    #: The tokens of a hypothesis that was drafted for: its proposal, sent already, is the answer.
    ALREADY_DRAFTED = auto()
    #: Less than is known already.
    OLD = auto()


class CoreSession:
    """A :class:`~specdec.backends.DraftSession` on the core's drafter.

    Nothing changes while the session's state is in the drafter's hands: what arrives meanwhile is kept and taken in
    at once when the batch ends, in order; only the newest message is worked on. Of a batch that drafts ahead, what the
    messages make impossible ends at the next step; what they make true goes on, and is the answer.

    For a drafter that reads the target's hidden states nothing is drafted ahead: those of the tokens assumed are not
    known before the verdict.
    """

    def __init__(self, core: DraftCore, spec: SessionSpec, state: DraftState) -> None:
        self._core = core
        self._state = state
        self._park_as = spec.session_id if spec.park else None
        #: Committed length at which the output is complete.
        self._max_len = 2**62 if spec.params.max_tokens is None else spec.prompt_len + spec.params.max_tokens
        #: What was asked for and is not there yet, and what is drafted ahead at this moment.
        self._wish: DraftRequest[Any] | None = None
        self._ahead: dict[Hypothesis, DraftRequest[Any]] = {}
        self._sampling = spec.draft_sampling
        self._tree = VerdictTree(
            SessionOdds(core.odds[self._sampling]), frozenset(spec.params.stop_token_ids), self._num_tokens_at
        )
        self._reads_states = bool(core.drafter.info.hidden_state_layers)
        self._may_look_ahead = not self._reads_states and core.tree is None
        #: Tokens a proposal may have, as the latest message wants it.
        self._wanted = 0
        self._arrived: list[Advance] = []
        self._outbox = ProposalQueue()
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

    @property
    def tree(self) -> VerdictTree:
        """Guesses at the coming verdicts."""
        return self._tree

    async def prefill(self) -> None:
        """Take in the tokens of the opening."""
        if not self._state.num_pending:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(outcome: Draft | Exception) -> None:
            self._wish = None
            if done.done():
                return
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(None)

        self._submit(DraftRequest(self._state, 0, finish))
        await done

    async def advance(
        self,
        base_len: int,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        num_ahead_proposals: int = 0,
        hidden_states: Sequence[HiddenStates] = (),
    ) -> None:
        """Commit ``token_ids`` after ``base_len`` and ask for a proposal; never waits.

        Tokens known here already are compared: where they disagree, the new ones win and what followed is dropped.
        A message that brings nothing but tokens known here, and fewer, is old: it is counted, changes nothing and gets
        an empty proposal. The proposal is shorter, even empty, at the limits of the request and of the draft's context.
        Calls that were overtaken by a newer one get none.

        :meth:`receive` raises what was wrong with a message: :class:`StaleSession` where there is a gap before it,
        :class:`InvalidRequest` for an unknown token, and for hidden states of positions that are not committed or of
        another width than the drafter's. The session goes on without that message.

        Raises:
            StaleSession: the session is closed.
        """
        if self._closed:
            raise StaleSession("the session is closed; open it anew")
        message = Advance(
            base_len, token_ids, num_draft_tokens, num_ahead_proposals, hidden_states if self._reads_states else ()
        )
        self._arrived.append(message)
        flight = self._flight
        if flight is None:
            self._take_in()
            return
        if len(self._arrived) == 1:
            flight.on_landed.append(self._take_in)
        self._stop_stale(flight)

    async def receive(self) -> Proposal:
        """The next proposal, in the order they were drafted.

        Raises:
            StaleSession: a message did not fit.
            Cancelled: the session is closed.
            TandemError: drafting failed; the session goes on.
        """
        return await self._outbox.take()

    def received_more(self) -> list[Proposal]:
        """The proposals that :meth:`receive` would return without waiting; they count as received."""
        return self._outbox.drain()

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
            self._core.lookahead.discard(self)
            flight = self._flight
            for wish in self._wishes:
                wish.settle(Cancelled("the session was closed"))
                wish.withdraw()
            if flight is not None:
                flight.on_landed.append(self._release)
            else:
                self._release()
        await self._released.wait()

    def _release(self) -> None:
        self._released.set()
        self._core.release(self, self._state, self._park_as)

    # --- verdicts ---

    @property
    def _wishes(self) -> list[DraftRequest[Any]]:
        """All that is queued or being drafted."""
        return [*self._ahead.values()] if self._wish is None else [self._wish, *self._ahead.values()]

    @property
    def _flight(self) -> InflightBatch | None:
        """The batch that has the state in its hands."""
        return next((wish.flight for wish in self._wishes if wish.flight is not None), None)

    def _stop_stale(self, flight: InflightBatch) -> None:
        """A message arrived while a batch runs: end early what it has overtaken or made impossible."""
        if self._wish is not None:
            self._wish.withdraw()
        token_ids = self._arrived_tokens()
        is_wanted = self._arrived[-1].num_draft_tokens > 0
        is_answered = False
        for hypothesis, wish in self._ahead.items():
            if is_wanted and token_ids is not None and hypothesis.may_follow(token_ids):
                wish.likelihood = 1.0
                is_answered = True
            else:
                wish.likelihood = 0.0
                wish.stop.please()
        if is_wanted and not is_answered:
            self._core.batcher.expect(flight)

    def _arrived_tokens(self) -> list[int] | None:
        """The tokens that arrived; None where they do not simply continue what is committed."""
        token_ids: list[int] = []
        for message in self._arrived:
            if message.base_len != self.committed_len + len(token_ids):
                return None
            token_ids += message.token_ids
        return token_ids

    def _take_in(self) -> None:
        """Apply all that arrived; the newest message decides what is drafted. The state is idle."""
        arrived, self._arrived = self._arrived, []
        if not arrived:
            return
        if self._wish is not None:
            self._wish.withdraw()
            self._wish = None
        message = arrived[-1]
        self._wanted = message.num_draft_tokens
        try:
            news = [self._commit(message) for message in arrived]
            if message.num_draft_tokens <= 0:
                self._end_ahead()
            elif news[-1] is News.ALREADY_DRAFTED:
                self._look_ahead(message.num_ahead_proposals)
            else:
                self._draft(message, is_old=news[-1] is News.OLD)
        except Exception as error:
            self._end_ahead()
            self._outbox.put(error)

    def _commit(self, message: Advance) -> News:
        """Commit what is new in a message."""
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
        if message.hidden_states and message.hidden_states[-1].end > message.committed_len:
            raise InvalidRequest(
                f"hidden_states reach position {message.hidden_states[-1].end - 1}, but {message.committed_len} tokens"
                " are committed",
                param="hidden_states",
            )
        same = common_prefix_len(known[base_len : base_len + len(token_ids)], token_ids)
        if same == len(token_ids):
            if base_len + same < length:
                self._core.count_stale()
                return News.OLD
            if message.hidden_states:
                self._core.drafter.advance(self._state, length, (), message.hidden_states)
            return News.NEW  # the same again, and answered again
        if base_len + same < length:  # tokens are taken back, and with them the proposals for them
            self._outbox.clear()
            self._tree.clear()
        self._core.drafter.advance(self._state, base_len + same, token_ids[same:], message.hidden_states)
        if not self._tree.advance(token_ids[same:]):
            return News.NEW
        counts = self._core.lookahead.counts
        counts.num_hits += 1
        counts.num_hit_tokens += self._tree.num_drafted
        return News.ALREADY_DRAFTED

    # --- proposals ---

    def _draft(self, message: Advance, is_old: bool) -> None:
        """DraftRequest for the proposal that a message asks for."""
        length = message.committed_len
        num_tokens = 0 if is_old else self._num_tokens_at(length)
        tree = self._core.tree
        if tree is not None and num_tokens > 0:
            if self._sampling.sends_q:  # a chain drawn from q passes more often than chosen siblings do
                num_tokens = min(num_tokens, tree.depth)
                tree = None
            else:  # what limits a chain's length limits a tree's depth
                tree = tree.cut(self._depth_at(length))
                num_tokens = min(self._wanted, self._opened.num_speculative_tokens)
        if num_tokens <= 0:
            self._end_ahead()
            self._outbox.put(Proposal(self._opened.epoch, length, ()))
            return
        num_guesses = NUM_GUESSES if message.num_ahead_proposals > 0 and self._may_look_ahead else 0

        def answer(outcome: Draft | Exception) -> None:
            self._wish = None
            if isinstance(outcome, Exception):
                self._outbox.put(outcome)
                return
            self._send(outcome, wish)
            if num_guesses and outcome.token_ids:
                self._tree.plant(length, outcome)
            self._look_ahead(message.num_ahead_proposals)

        self._tree.clear()
        wish = DraftRequest(self._state, num_tokens, answer, num_guesses=num_guesses, tree=tree)
        self._submit(wish)

    def draft_for(self, hypothesis: Hypothesis) -> DraftRequest[Any]:
        """Begin to draft for a hypothesis of the tree."""
        self._tree.start(hypothesis)
        self._ahead[hypothesis] = wish = DraftRequest(
            self._state,
            hypothesis.num_tokens,
            partial(self._foresee, hypothesis),
            num_guesses=NUM_GUESSES,
            assumed=hypothesis.path,
            assumes_next=hypothesis.assumes_next,
            likelihood=hypothesis.likelihood,
        )
        return wish

    def _foresee(self, hypothesis: Hypothesis, outcome: Draft | Exception) -> None:
        """A hypothesis was drafted for: send it, unless a message that waits has made it impossible."""
        wish = self._ahead.pop(hypothesis)
        counts = self._core.lookahead.counts
        if isinstance(outcome, Exception):
            self._may_look_ahead = False
            self._end_ahead()
            return
        counts.num_tokens += len(outcome.token_ids)
        if not outcome.token_ids or (wish.stop.is_raised and len(outcome.token_ids) < hypothesis.num_tokens):
            counts.num_stopped += wish.stop.is_raised
            return
        self._tree.grow(hypothesis, outcome)
        if wish.likelihood > 0.0:
            counts.num_proposals += 1
            self._send(outcome, wish, hypothesis)
            self._core.lookahead.add(self)

    def _send(self, draft: Draft, wish: DraftRequest[Any], hypothesis: Hypothesis | None = None) -> None:
        self._outbox.put(
            Proposal(
                epoch=self._opened.epoch,
                base_len=self.committed_len,
                token_ids=draft.token_ids,
                parents=draft.parents,
                q_rows=draft.q_rows,
                assumed_token_ids=() if hypothesis is None else hypothesis.path,
                draft_ns=wish.draft_ns,
                queue_ns=wish.queue_ns,
                likelihood=0.0 if hypothesis is None else hypothesis.likelihood,
            )
        )

    def _look_ahead(self, num_ahead_proposals: int) -> None:
        """Draft for up to ``num_ahead_proposals`` hypotheses before the next verdict."""
        if num_ahead_proposals <= 0 or not self._may_look_ahead:
            self._end_ahead()
            return
        self._tree.budget = num_ahead_proposals
        self._core.lookahead.add(self)
        self._core.batcher.wake()

    def _end_ahead(self) -> None:
        self._tree.clear()
        self._core.lookahead.discard(self)
        self._core.drafter.drop_ahead(self._state)

    def _num_tokens_at(self, length: int) -> int:
        """Tokens of a proposal for a committed length, of which what is not committed yet is assumed; 0 and less: none.

        The target adds a token of its own to what it accepts, so the last one of the request need not be drafted.
        """
        return min(self._wanted, self._opened.num_speculative_tokens, self._depth_at(length))

    def _depth_at(self, length: int) -> int:
        """Tokens that may be drafted one after the other, however many are wanted."""
        room = self._core.drafter.room(self._state) - (length - self.committed_len)
        return min(self._max_len - length - 1, room)

    def _submit(self, wish: DraftRequest[Any]) -> None:
        self._wish = wish
        self._core.batcher.submit(wish)
