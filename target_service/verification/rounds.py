"""Rounds of a step, their outcomes, and the check of a proposal before its round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.native import library
from engine.native.sampling_verify import is_well_formed
from engine.sampling import sparse
from engine.sampling.state import SamplingState
from specdec import trees
from specdec.errors import InternalError, InvalidRequest, TandemError
from specdec.logprobs import PositionLogprobs
from specdec.rules import Rule, SparseRow
from target_service.grammar.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Round:
    """One session's part of a step: k drafted tokens and k + 1 rows of logits (k = 0: plain decoding, prefill).

    Row ``start_row`` decides the first token, row ``start_row + i + 1`` the one after drafted token i.
    """

    #: Committed tokens up to the round; the round's first token will stand at position len(state).
    state: SamplingState
    rule: Rule
    start_row: int
    draft_token_ids: Sequence[int] = ()
    #: Empty (q is one-hot, or the rule uses none), or one per group of siblings, in a chain one per token.
    q_rows: Sequence[SparseRow] = ()
    #: As in SamplingParams: None reports nothing, 0 only the token that stands at each position.
    logprobs: int | None = None
    #: Index of each drafted token's parent, -1 for the committed tokens; empty: a chain. Siblings differ.
    parents: Sequence[int] = ()
    #: What the output must look like; None: anything.
    grammar: Grammar | None = None
    #: Of each row the tokens that may be drawn: bit t % 32 of word t // 32, int32 [k + 1, W]; None: all.
    masks: Tensor | None = None

    @property
    def follows(self) -> Sequence[int]:
        """Of each drafted token the one it follows, in chains, too."""
        return self.parents or range(-1, len(self.draft_token_ids) - 1)

    def path_to(self, place: int) -> Sequence[int]:
        """The indices of the drafted tokens before a place; see :mod:`target_service.verification.rules.drafts`."""
        return trees.path_to(self.parents, place - 1) if self.parents else range(place)

    def outcome(self, end: int, token_id: int) -> Outcome:
        """The outcome of a walk that ended at place ``end``, where the target emits ``token_id``."""
        path = self.path_to(end)
        return Outcome(len(path), (*self._token_ids_on(path), token_id), path=path)

    def _token_ids_on(self, path: Sequence[int]) -> Sequence[int]:
        return [self.draft_token_ids[i] for i in path] if self.parents else self.draft_token_ids[: len(path)]

    def failure(self, end: int, logits: Tensor) -> Outcome:
        """The outcome of a walk that ended where no token can be drawn; the step's ``logits`` [R, V] tell why."""
        path = self.path_to(end)
        error = self._error(logits[self.start_row + end], len(self.state) + len(path))
        return Outcome(len(path), tuple(self._token_ids_on(path)), path=path, error=error)

    def _error(self, row: Tensor, position: int) -> TandemError:
        if bool(row.isnan().any() | row.isposinf().any()):
            return InternalError(f"the model's logits at position {position} are not finite")
        text = (
            f"the request's parameters (structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias)"
            f" forbid every token at position {position}"
        )
        if self.masks is None:
            return InvalidRequest(text, param="allowed_token_ids")
        text += "; a grammar does so where it is too large to be followed: simplify it"
        return InvalidRequest(text, param="structured_outputs")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round commits. It ignores stop tokens and limits: the step cuts it where the sequence ends."""

    num_accepted: int
    #: The accepted drafts, then the target's own token unless there is an ``error``.
    token_ids: tuple[int, ...]
    #: One per token where the round asked for them.
    logprobs: tuple[PositionLogprobs, ...] = ()
    #: Set if no token could be drawn after the accepted drafts. This session alone fails, unless one of them ends the
    #: sequence: plain decoding would not have drawn there.
    error: TandemError | None = None
    #: The drafted tokens that were accepted: their indices in the round. Drafted token i was fed as row i + 1 of the
    #: round's rows, behind the last committed token.
    path: Sequence[int] = ()


def check_draft(
    token_ids: Sequence[int], q_rows: Sequence[SparseRow], num_tokens: int, parents: Sequence[int] = ()
) -> None:
    """Refuse a proposal that no rule can verify, before its tokens reach the model.

    Raises :class:`InvalidRequest` on an id outside 0..num_tokens-1, a q row that is malformed or could not have drawn
    its token, or parents that make no tree of tokens that differ from their siblings.
    """
    trees.check(len(token_ids), parents, len(q_rows))
    if parents:
        if len(set(zip(parents, token_ids, strict=True))) != len(token_ids):
            what = "a token is drafted twice after the same tokens; siblings must differ"
            raise InvalidRequest(what, param="parents")
        q_rows = [q_rows[group] for group in trees.groups(parents)] if q_rows else ()
    kernels = library.load()
    if kernels is not None and is_well_formed(kernels, token_ids, q_rows, num_tokens):
        return
    if token_ids:
        _check_range(min(token_ids), max(token_ids), num_tokens)
    for token_id, row in zip(token_ids, q_rows, strict=False):
        named, _ = sparse.unpack(row)
        _check_range(int(named[0]), int(named[-1]), num_tokens)
        if token_id not in named:
            raise InvalidRequest(f"drafted token {token_id} is not in its q row, so it was not drawn from it")


def _check_range(smallest: int, largest: int, num_tokens: int) -> None:
    if not 0 <= smallest <= largest < num_tokens:
        raise InvalidRequest(f"a proposal names tokens {smallest} to {largest}; tokens are 0 to {num_tokens - 1}")
