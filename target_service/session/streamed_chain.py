"""The tokens that a draft has streamed to one session, as far as they may still be verified."""

from __future__ import annotations

from typing import Final

from specdec.errors import InvalidRequest
from specdec.types import Proposal

#: Tokens that are kept at most. A target asks for fewer.
MAX_TOKENS: Final = 1024
#: Steps before the first proposal. A draft that is further away gains next to nothing (1.05 at ten steps, simulated).
MAX_STEPS_BEFORE: Final = 16


class StreamedChain:
    """Drafted tokens after the committed ones, in the order they came.

    A chain is over with the first token that differs from what was committed: the draft, which hears of it, begins
    another one. Until its first proposal comes there is nothing to verify, and nothing waits for it. What is there at
    a time depends on times and on committed tokens; so this is for rules whose text does not depend on proposals.
    """

    def __init__(self) -> None:
        #: Those that follow the committed tokens.
        self.token_ids: tuple[int, ...] = ()
        self._number = -1
        self._num_steps = 0
        #: Length of the text with all tokens that came.
        self._end = 0
        #: The draft begins another chain when it hears of so much text; None: the present one may go on.
        self.over_len: int | None = 0
        self._draft_ns = 0

    @property
    def has_begun(self) -> bool:
        """Whether a proposal has come, or should have: from then on each step counts as a round."""
        return self._number >= 0 or self._num_steps > MAX_STEPS_BEFORE

    def take_draft_ns(self) -> int:
        """How long the draft computed for what came since the last call."""
        draft_ns, self._draft_ns = self._draft_ns, 0
        return draft_ns

    def add(self, proposal: Proposal, known: tuple[int, ...], committed_len: int) -> bool:
        """Take a proposal; whether it began a chain. ``known``: what is committed after its ``base_len``.

        Raises:
            InvalidRequest: the draft may not stream this, or so much.
        """
        if proposal.q_rows or proposal.parents:
            raise InvalidRequest("a proposal of a stream is a chain without q_rows", param="q_rows")
        self._draft_ns += proposal.draft_ns
        if begins := proposal.chain != self._number:
            self._number, self._end, self.token_ids = proposal.chain, proposal.base_len, ()
            self.over_len = proposal.base_len if proposal.base_len > committed_len else None
        if self.over_len is None and proposal.base_len != self._end:
            self.over_len = proposal.base_len
        if self.over_len is not None:
            self.token_ids = ()
            return begins
        token_ids = proposal.token_ids
        self._end += len(token_ids)
        self.over_len = _first_other(proposal.base_len, token_ids, known)
        self.token_ids = () if self.over_len is not None else self.token_ids + token_ids[len(known) :]
        if len(self.token_ids) > MAX_TOKENS:
            raise InvalidRequest(f"the draft streamed more than {MAX_TOKENS} tokens ahead", param="token_ids")
        return begins

    def commit(self, token_ids: tuple[int, ...]) -> None:
        """Tokens were committed."""
        self._num_steps += 1
        if self.over_len is None:
            self.over_len = _first_other(self._end - len(self.token_ids), self.token_ids, token_ids)
        self.token_ids = () if self.over_len is not None else self.token_ids[len(token_ids) :]


def _first_other(base_len: int, drafted: tuple[int, ...], committed: tuple[int, ...]) -> int | None:
    """Length of the text with the first committed token that differs from the drafted one; None: none does."""
    pairs = enumerate(zip(drafted, committed, strict=False), base_len + 1)
    return next((length for length, (ours, theirs) in pairs if ours != theirs), None)
