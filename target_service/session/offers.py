"""The proposal of one session that waits for a step."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto

from specdec.errors import InvalidRequest
from specdec.trees import is_chain
from specdec.types import DraftedRound, Proposal
from target_service.session.progress import Progress, State
from target_service.session.streamed_chain import StreamedChain
from target_service.step import StepSession
from target_service.verification.rounds import check_draft


class Fate(Enum):
    """What becomes of a proposal that is offered."""

    #: The session is idle: the proposal's round begins.
    STARTS = auto()
    #: What is left of it takes the place of multi-step decode's next token.
    REPLACES_TOKEN = auto()
    #: Multi-step decode went on meanwhile: counted and dropped.
    SUPERSEDED = auto()
    #: It fits nothing that the session was told: counted and dropped.
    STALE = auto()


class Offers:
    """What was offered to a session and no step has taken yet."""

    def __init__(self, step_session: StepSession, progress: Progress) -> None:
        self._session = step_session
        self._progress = progress
        #: The round asked for.
        self.asked: Proposal | None = None
        #: What a draft streams, and how much of it a round verifies; None: none does.
        self.chain: StreamedChain | None = None
        self.num_streamed = 0

    def check(self, proposal: Proposal) -> Proposal:
        """A proposal that the target can verify, a tree without siblings as a chain.

        Raises:
            InvalidRequest: it cannot be verified.
        """
        limit = self._session.spec.num_speculative_tokens
        if len(proposal.token_ids) > limit:
            raise InvalidRequest(
                f"the proposal has {len(proposal.token_ids)} tokens; the session was opened with"
                f" num_speculative_tokens = {limit}",
                param="token_ids",
            )
        check_draft(proposal.token_ids, proposal.q_rows, self._session.state.num_tokens, proposal.parents)
        chain = _as_chain(proposal)
        if chain.parents and self._session.sequence.states is not None:
            raise InvalidRequest(
                "the proposal is a tree, and the target's recurrent states follow a chain of tokens: start the draft"
                " without tree_top_k and speculative_token_tree",
                param="parents",
            )
        return chain

    def fate(self, base_len: int) -> Fate:
        """What becomes of a proposal for this length, now."""
        progress = self._progress
        if progress.is_multi_step:
            return Fate.REPLACES_TOKEN
        if base_len == progress.committed_len and progress.state is State.IDLE:
            return Fate.STARTS
        return Fate.SUPERSEDED if progress.may_be_late(base_len) else Fate.STALE

    def cut(self, proposal: Proposal) -> Proposal:
        """The proposal without what it cannot bring: near its limit a sequence has no room for all drafted tokens."""
        room = self._session.stop_criteria.room(self._progress.committed_len) - 1
        num_entries = self._session.max_entries - self._progress.committed_len  # siblings take room of their own
        return _as_chain(proposal.cut(num_entries, max_depth=room))

    def fitted(self, proposal: Proposal | None) -> Proposal | None:
        """What takes the place of multi-step decode's next token; None where nothing is left."""
        fitted = None if proposal is None else self.cut(proposal)
        return fitted if fitted is not None and fitted.token_ids else None

    def commit(self, token_ids: tuple[int, ...]) -> bool:
        """Tokens were committed: keep what is left of the round asked for. Whether it was dropped.

        Once multi-step decode has ended no round can be asked for, one that came during a step of it included.
        """
        if self.chain is not None:
            self.chain.commit(token_ids)
            self._ask_streamed()
            return False
        if self.asked is None:
            return False
        self.asked = self.fitted(self.asked.after(token_ids)) if self._progress.is_multi_step else None
        return self.asked is None

    def add_streamed(self, proposal: Proposal) -> bool:
        """A proposal of the stream came; see :meth:`StreamedChain.add`. Nothing where the stream has ended."""
        if self.chain is None:
            return False
        length = self._progress.committed_len
        known = tuple(self._session.state.token_ids[proposal.base_len : length])
        begins = self.chain.add(self.check(proposal), known, length)
        self._ask_streamed()
        return begins

    def _ask_streamed(self) -> None:
        """Ask for what the draft has streamed by now, if anything, as long as a token may follow."""
        assert self.chain is not None
        token_ids = self.chain.token_ids[: self.num_streamed] if self._progress.is_multi_step else ()
        proposal = Proposal(self._session.spec.epoch, self._progress.committed_len, token_ids)
        self.asked = self.fitted(proposal) if token_ids else None

    def streamed_round(self, num_tokens: int) -> DraftedRound | None:
        """What the verdict of a step with so many streamed tokens tells of them; None where nothing is streamed yet."""
        if self.chain is None or not self.chain.has_begun:
            return None
        return DraftedRound(num_tokens, self.num_streamed, self.chain.take_draft_ns(), is_stream=True)

    def clear(self) -> bool:
        """Drop the round asked for; whether there was one."""
        was_asked, self.asked, self.chain = self.asked is not None, None, None
        return was_asked


def _as_chain(proposal: Proposal) -> Proposal:
    """A tree without siblings as a chain; others as they are."""
    return replace(proposal, parents=()) if proposal.parents and is_chain(proposal.parents) else proposal
