"""The verifier: logits of a tick and the rounds they belong to, in; what each round committed, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.errors import InvalidRequest
from specdec.sampling.state import SamplingState
from specdec.sessions import PositionLogprobs, Rule, SparseRow


@dataclass(frozen=True, slots=True)
class Round:
    """One session's part of a tick: k drafted tokens and k + 1 rows of logits (k = 0: plain decoding, prefill)."""

    #: Committed tokens up to the round; the round's first token will stand at position len(state).
    state: SamplingState
    rule: Rule
    #: Row of the tick's logits that decides the first token; the others follow it.
    start_row: int
    draft_token_ids: Sequence[int] = ()
    #: Empty (the draft is deterministic, or the rule is coupled) or one per drafted token.
    q_rows: Sequence[SparseRow] = ()
    #: As in SamplingParams: None reports nothing, 0 only the token that stands at each position.
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round commits. Stop tokens and limits are not looked at: the batcher cuts where the sequence ends."""

    num_accepted: int
    #: The accepted drafts, then the target's own token.
    token_ids: tuple[int, ...]
    #: One per token where the round asked for them.
    logprobs: tuple[PositionLogprobs, ...] = ()
    #: Set, and the rest empty, where the parameters left no token to draw: fail this session alone.
    error: InvalidRequest | None = None


def check_draft(token_ids: Sequence[int], q_rows: Sequence[SparseRow], num_tokens: int) -> None:
    """Refuse a proposal no rule can verify, before its tokens reach the model.

    Raises :class:`InvalidRequest` on an id outside 0..num_tokens-1 or a q row that is malformed or could not have
    drawn its token.
    """
    raise NotImplementedError


class Verifier:
    """Turns the logits of one tick into tokens. Stateless; the states of the rounds are read, not advanced."""

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Outcome]:
        """Decide every round: ``logits`` float32 [R, V] raw, untouched; one transfer to the host in all.

        The caller commits: ``state.commit(outcome.token_ids)`` (as many of them as the sequence keeps).
        """
        raise NotImplementedError
