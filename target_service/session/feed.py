"""What a session feeds to the next step: tokens that have no entry yet, or a round."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from target_service.session.offers import Offers
from target_service.session.progress import Progress, State
from target_service.step import ScheduledSequence, StepSession

#: Rows of a prompt's chunk whose log-probabilities are asked for: each row is as wide as the vocabulary.
MAX_SCORED_ROWS: Final = 64


class Feed:
    """First the tokens before the next decision that lack an entry: of a prompt, or after a preemption. Then rounds."""

    def __init__(self, step_session: StepSession, progress: Progress, offers: Offers) -> None:
        self._session = step_session
        self._progress = progress
        self._offers = offers
        #: Whether any token may have no entry. False spares :attr:`num_missing`: between two steps of 64 sessions that
        #: decode the event loop then needs 619 µs, not 694 (without a model).
        self.is_behind = True

    @property
    def num_needed(self) -> int:
        """Entries that come before the next decision."""
        return len(self._session.state) - (self._progress.state is not State.PREFILL)

    @property
    def num_missing(self) -> int:
        """Those that are not there. Nothing is decided before they are fed."""
        return 0 if self._progress.state is State.OVER else self.num_needed - self._session.sequence.length

    def chunk(self, num_rows: int) -> ScheduledSequence:
        """The next ``num_rows`` missing tokens or fewer."""
        session, is_prefill = self._session, self._progress.state is State.PREFILL
        if is_prefill and session.spec.params.prompt_logprobs is not None:
            num_rows = min(num_rows, MAX_SCORED_ROWS)
        num_missing, start = self.num_missing, session.sequence.length
        if start < session.sequence.fork:
            num_rows = min(num_rows, session.sequence.fork - start)
        token_ids = session.state.token_ids[start : start + min(num_rows, num_missing)]
        return ScheduledSequence(
            session, token_ids, decides=is_prefill and num_rows >= num_missing, is_prefill=is_prefill
        )

    @property
    def has_round(self) -> bool:
        """Whether a round, or a token of multi-step decode, is to be fed."""
        progress = self._progress
        return progress.is_multi_step or (progress.state is State.ROUND and self._offers.asked is not None)

    @property
    def num_round_tokens(self) -> int:
        """Tokens of the round that is ready, at most; 0 without one."""
        if not self.has_round:
            return 0
        asked = self._offers.asked
        return max(0 if asked is None else len(asked.token_ids), len(self.forced())) + 1

    def forced(self) -> tuple[int, ...]:
        """What the grammar forces next, as far as it may be committed. Called by whom the step session belongs to."""
        grammar, state = self._session.grammar, self._session.state
        if grammar is None:
            return ()
        is_round, progress = self._offers.asked is not None, self._progress
        limit = self._session.stop_criteria.max_len if is_round else progress.multi_step_until
        forced = grammar.forced[: max(0, limit - len(state) - 1)]
        # A tokenizer may have tokens that the model lacks.
        return tuple(takewhile(lambda token_id: token_id < state.num_tokens, forced))

    def holds_states(self, num_tokens: int) -> bool:
        """Whether multi-step decode goes on after the next ``num_tokens`` tokens, so that their hidden states may wait.
        Called by whom the step session belongs to. On a GPU they leave with each verdict: there they cost little.
        """
        session = self._session
        if not session.spec.hidden_state_layers or session.state.device.type != "cpu":
            return False
        return self._progress.multi_step_until > len(session.state) + num_tokens

    def take_round(self) -> ScheduledSequence:
        """The round that is ready: what was offered, or the next token of multi-step decode, with what is forced."""
        forced = self.forced()
        asked, self._offers.asked = self._offers.asked, None
        session, last = self._session, self._session.state.token_ids[-1]
        if asked is None:
            holds = self.holds_states(1 + len(forced))
            return ScheduledSequence(session, (last, *forced), decides=True, draft_token_ids=forced, holds_states=holds)
        self._progress.take_round()
        drafts = asked if session.grammar is None else session.grammar.drafts(asked, len(forced))
        return ScheduledSequence(
            session,
            (last, *drafts.token_ids),
            decides=True,
            draft_token_ids=drafts.token_ids,
            q_rows=drafts.q_rows,
            proposed_token_ids=() if asked.parents and not drafts.parents else asked.token_ids[: len(drafts.token_ids)],
            parents=drafts.parents,
            is_round=True,
            holds_states=self.holds_states(1 + len(drafts.token_ids)),
        )
