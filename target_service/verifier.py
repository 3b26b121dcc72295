"""The verifier: logits of a step and the rounds they belong to, in; what each round committed, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.engine.native import library
from specdec.engine.native.sampling_verify import is_well_formed, verify_rounds
from specdec.errors import InternalError, InvalidRequest, TandemError
from specdec.rules import Rule, SparseRow
from specdec.sampling import sparse
from specdec.sampling.distribution import distribution
from specdec.sampling.edits import edited
from specdec.sampling.noise import Stream
from specdec.sampling.rows import Rows
from specdec.sampling.state import SamplingState
from specdec.sampling.transfer import send
from specdec.trees import depths, groups, path_to
from specdec.types import PositionLogprobs
from target_service.logprobs import read, score
from target_service.rules import block, coupled, greedy, siblings, token
from target_service.rules.drafts import Drafts, Q, Siblings, Uniforms


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
    #: Empty (the draft is deterministic, or the rule is coupled) or one per group of siblings, in a chain per token.
    q_rows: Sequence[SparseRow] = ()
    #: As in SamplingParams: None reports nothing, 0 only the token that stands at each position.
    logprobs: int | None = None
    #: Of each drafted token the one it follows, -1 for the committed tokens; empty: a chain. Siblings differ.
    parents: Sequence[int] = ()

    def path_to(self, place: int) -> Sequence[int]:
        """The drafted tokens (their indices) before a place; see :class:`~target_service.rules.drafts.Drafts`."""
        return path_to(self.parents, place - 1) if self.parents else range(place)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round commits. Stop tokens and limits are not looked at: the batcher cuts where the sequence ends."""

    num_accepted: int
    #: The accepted drafts, then the target's own token.
    token_ids: tuple[int, ...]
    #: One per token where the round asked for them.
    logprobs: tuple[PositionLogprobs, ...] = ()
    #: Set, and the rest empty, where there was no token to draw: fail this session alone.
    error: TandemError | None = None
    #: The drafted tokens that were accepted: their indices in the round. Drafted token i was fed as row i + 1 of the
    #: round's rows, behind the last committed token.
    path: Sequence[int] = ()


def check_draft(
    token_ids: Sequence[int], q_rows: Sequence[SparseRow], num_tokens: int, parents: Sequence[int] = ()
) -> None:
    """Refuse a proposal no rule can verify, before its tokens reach the model.

    Raises :class:`InvalidRequest` on an id outside 0..num_tokens-1, a q row that is malformed or could not have drawn
    its token, or parents that make no tree of tokens that differ from their siblings.
    """
    if parents:
        q_rows = _check_tree(token_ids, q_rows, parents)
    kernels = library.load()
    if kernels is not None and is_well_formed(kernels, token_ids, q_rows, num_tokens):
        return
    if q_rows and len(q_rows) != len(token_ids):
        raise InvalidRequest(f"{len(token_ids)} drafted tokens came with {len(q_rows)} q rows; send one each or none")
    if token_ids:
        _check_range(min(token_ids), max(token_ids), num_tokens)
    for token_id, row in zip(token_ids, q_rows, strict=False):
        named, _ = sparse.unpack(row)
        _check_range(int(named[0]), int(named[-1]), num_tokens)
        if token_id not in named:
            raise InvalidRequest(f"drafted token {token_id} is not in its q row, so it was not drawn from it")


def _check_tree(token_ids: Sequence[int], q_rows: Sequence[SparseRow], parents: Sequence[int]) -> Sequence[SparseRow]:
    """The q row of each token."""
    if len(parents) != len(token_ids):
        raise InvalidRequest(
            f"{len(token_ids)} drafted tokens came with {len(parents)} parents; send one each or none", param="parents"
        )
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise InvalidRequest(
                f"parents[{index}] is {parent}; a parent stands before its child, or is -1 for the prefix",
                param="parents",
            )
    if len(set(zip(parents, token_ids, strict=True))) != len(token_ids):
        raise InvalidRequest("a token is drafted twice after the same tokens; siblings must differ", param="parents")
    if not q_rows:
        return ()
    numbers = groups(parents)
    if len(q_rows) != max(numbers) + 1:
        raise InvalidRequest(
            f"{max(numbers) + 1} groups of siblings came with {len(q_rows)} q rows; send one each or none",
            param="q_rows",
        )
    return [q_rows[group] for group in numbers]


def _check_range(smallest: int, largest: int, num_tokens: int) -> None:
    if not 0 <= smallest <= largest < num_tokens:
        raise InvalidRequest(f"a proposal names tokens {smallest} to {largest}; tokens are 0 to {num_tokens - 1}")


class Verifier:
    """Turns the logits of one step into tokens. Stateless; the states of the rounds are read, not advanced.

    On a CPU the kernels decide all rounds in one call, where there are kernels; else, and on other devices, the rules
    run on tensors. Both decide alike (but for the last bits of sums over the vocabulary).
    """

    def __init__(self, *, native: bool = True, num_threads: int | None = None) -> None:
        """``native``: whether to use the kernels where they can be; ``num_threads``: theirs, None takes torch's."""
        self._kernels = library.load() if native else None
        self._num_threads = num_threads

    def verify(self, logits: Tensor, rounds: Sequence[Round]) -> list[Outcome]:
        """Decide every round: ``logits`` float32 [R, V] raw, untouched; one transfer to the host in all.

        The caller commits: ``state.commit(outcome.token_ids)`` (as many of them as the sequence keeps).
        """
        if not rounds:
            return []
        if self._kernels is not None and logits.device.type == "cpu" and logits.is_contiguous():
            decisions = verify_rounds(self._kernels, logits, rounds, num_threads=self._num_threads)
            if decisions is not None:
                return _outcomes(logits, rounds, decisions)
        return _verify_in_torch(logits, rounds)


def _outcomes(logits: Tensor, rounds: Sequence[Round], decisions: Sequence[tuple[int, int, bool]]) -> list[Outcome]:
    outcomes = []
    for r, (end, token_id, valid) in zip(rounds, decisions, strict=True):
        outcomes.append(_outcome(r, end, token_id) if valid else Outcome(0, (), error=_explain(r, end, logits)))
    if any(r.logprobs is not None for r in rounds):
        _add_logprobs(logits, rounds, outcomes)
    return outcomes


def _outcome(r: Round, end: int, token_id: int) -> Outcome:
    """The walk along the round's drafted tokens ended at place ``end``; there stands the target's own token."""
    path = r.path_to(end)
    if not r.parents:
        return Outcome(end, (*r.draft_token_ids[:end], token_id), path=path)
    return Outcome(len(path), (*(r.draft_token_ids[i] for i in path), token_id), path=path)


def _add_logprobs(logits: Tensor, rounds: Sequence[Round], outcomes: list[Outcome]) -> None:
    asked = [(r, outcome) for r, outcome in zip(rounds, outcomes, strict=True) if r.logprobs is not None]
    at = [
        (r.start_row + row, token_id)
        for r, outcome in asked
        for row, token_id in zip((0, *(i + 1 for i in outcome.path)), outcome.token_ids, strict=False)
    ]
    if not at:
        return
    rows, token_ids = torch.tensor(at).unbind(1)
    num_tokens = rounds[0].state.num_tokens
    num_top = min(max(r.logprobs or 0 for r, _ in asked), num_tokens)
    scored = iter(score(logits[rows], token_ids, num_top, num_tokens).tolist())
    for i, (r, outcome) in enumerate(zip(rounds, outcomes, strict=True)):
        if r.logprobs is not None:
            logprobs = tuple(read(next(scored), token_id, r.logprobs) for token_id in outcome.token_ids)
            outcomes[i] = replace(outcome, logprobs=logprobs)


def _verify_in_torch(logits: Tensor, rounds: Sequence[Round]) -> list[Outcome]:
    of_kind: dict[tuple[Rule | None, bool, bool], list[int]] = {}
    for i, r in enumerate(rounds):
        of_kind.setdefault(_kind(r), []).append(i)
    groups = [_Group.of(logits, [rounds[i] for i in indices]) for indices in of_kind.values()]
    host = torch.cat([part for group in groups for part in group.decide(logits)]).tolist()

    outcomes: list[Outcome | None] = [None] * len(rounds)
    at = 0
    for group, indices in zip(groups, of_kind.values(), strict=True):
        for i, outcome in zip(indices, group.read(host[at : at + group.num_values], logits), strict=True):
            outcomes[i] = outcome
        at += group.num_values
    return [outcome for outcome in outcomes if outcome is not None]


def _kind(r: Round) -> tuple[Rule | None, bool, bool]:
    """Rounds of one kind are decided together: greedy ones, or those of one rule that all truncate or all do not; trees
    apart from chains.
    """
    is_tree = len(r.parents) > 0
    return (None, False, is_tree) if r.state.params.greedy else (r.rule, r.state.truncates, is_tree)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rounds of one kind and their rows, one after the other."""

    rounds: Sequence[Round]
    drafts: Drafts
    rows: Rows
    #: For each row of the group its row in the step's logits.
    logit_rows: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, rounds: Sequence[Round]) -> _Group:
        token_ids, parents = [r.draft_token_ids for r in rounds], [r.parents for r in rounds]
        is_tree = len(parents[0]) > 0
        return cls(
            rounds,
            Drafts.trees(token_ids, parents, logits.device) if is_tree else Drafts.chains(token_ids, logits.device),
            Rows.along([r.state for r in rounds], token_ids, parents),
            [r.start_row + i for r in rounds for i in range(len(r.draft_token_ids) + 1)],
        )

    # --- on the device ---

    def decide(self, logits: Tensor) -> list[Tensor]:
        """All that must reach the host, flat float64: ends, next tokens and validity, then the log-probabilities."""
        end, next_token, valid = self._apply_rule(edited(_pick(logits, self.logit_rows), self.rows))
        decided_here = valid[self.drafts.row_at(end)]
        values = [end.double(), next_token.double(), decided_here.double()]
        if self._scored_rounds:
            values.append(self._score(logits, end, next_token).flatten())
        return values

    def _apply_rule(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Edited logits [r, V] to (the places where walks end [B], next token [B], valid [r])."""
        if self.rounds[0].state.params.greedy:
            return greedy.verify(logits, self.drafts)
        target = distribution(logits, self.rows)
        rule = self.rounds[0].rule
        if rule is Rule.COUPLED:
            positions = zip(self.rows.states, self.rows.positions, strict=True)
            keys = [state.noise_key(Stream.COUPLING, position) for state, position in positions]
            return *coupled.verify(target, self.drafts, send(keys, logits.device)), target.valid
        if self.drafts.parents is not None:
            group = Siblings.of(
                [r.draft_token_ids for r in self.rounds],
                [r.parents for r in self.rounds],
                [r.q_rows for r in self.rounds],
                self.drafts,
            )
            return *siblings.verify(target.probabilities(), self.drafts, group, self._uniforms()), target.valid
        verify = token.verify if rule is Rule.TOKEN else block.verify
        q = Q.sparse([r.q_rows for r in self.rounds], self.drafts)
        return *verify(target.probabilities(), self.drafts, q, self._uniforms()), target.valid

    def _uniforms(self) -> Uniforms:
        """Acceptance and residual numbers are keyed by where the round starts, and so never serve two rounds.

        A position that is drafted again after a rejection must not meet its old numbers: block verification has
        looked at them to decide where the round ended.
        """
        k, is_tree = self.drafts.token_ids.shape[1], self.drafts.parents is not None
        u = [
            r.state.uniforms(Stream.ACCEPT, len(r.state), range(k))
            + r.state.uniforms(Stream.RESIDUAL, len(r.state), range(k))
            + (
                _bonus_by_place(r, k)
                if is_tree
                else r.state.uniforms(Stream.BONUS, len(r.state) + len(r.draft_token_ids))
            )
            for r in self.rounds
        ]
        numbers = send(u, self.drafts.token_ids.device, torch.float64)  # [B, 2 k + 1], of trees [B, 3 k + 1]
        bonus = numbers[:, 2 * k :] if is_tree else numbers[:, 2 * k]
        return Uniforms(numbers[:, :k], numbers[:, k : 2 * k], bonus)

    # --- log-probabilities ---

    @property
    def _scored_rounds(self) -> list[int]:
        return [b for b, r in enumerate(self.rounds) if r.logprobs is not None]

    @property
    def _num_top(self) -> int:
        return max(min(r.logprobs or 0, r.state.num_tokens) for r in self.rounds)

    def _score(self, logits: Tensor, end: Tensor, next_token: Tensor) -> Tensor:
        """Packed log-probabilities of all rows of the rounds that ask; rows off the accepted path mean nothing."""
        padded = torch.cat([self.drafts.token_ids, next_token[:, None]], dim=1)  # [B, k + 1], by place
        if self.drafts.parents is not None:
            padded = self._following(end)
        padded.scatter_(1, end[:, None], next_token[:, None])
        at = [(b, i) for b in self._scored_rounds for i in range(len(self.rounds[b].draft_token_ids) + 1)]
        b, i = send(at, logits.device).unbind(1)
        picked = logits[send([self.rounds[b].start_row + i for b, i in at], logits.device)]
        return score(picked, padded[b, i], self._num_top, self.rounds[0].state.num_tokens)

    def _following(self, end: Tensor) -> Tensor:
        """The drafted token after each place of the path to ``end``: int64 [B, k + 1]; others mean nothing."""
        assert self.drafts.parents is not None
        before = pad(self.drafts.parents + 1, (1, 0))  # [B, k + 1], the place before each
        drafted = pad(self.drafts.token_ids, (1, 1))
        place, spare = end[:, None], before.shape[1]
        following = torch.zeros_like(drafted)
        for _ in range(max(max(depths(r.parents or (-1,))) for r in self.rounds) + 1):
            previous = before.gather(1, place)
            following.scatter_(1, torch.where(place > 0, previous, spare), drafted.gather(1, place))
            place = previous
        return following[:, :-1]

    # --- on the host ---

    @property
    def num_values(self) -> int:
        """How many numbers :meth:`decide` sends."""
        num_rows = sum(len(self.rounds[b].draft_token_ids) + 1 for b in self._scored_rounds)
        return 3 * len(self.rounds) + (2 + 2 * self._num_top) * num_rows

    def read(self, values: Sequence[float], logits: Tensor) -> list[Outcome]:
        """The outcomes in the group's order. ``logits`` are looked at only to explain a failure."""
        count = len(self.rounds)
        outcomes = []
        at = 3 * count
        width = 2 + 2 * self._num_top
        for b, r in enumerate(self.rounds):
            end = int(values[b])
            outcome = _outcome(r, end, int(values[count + b]))
            if r.logprobs is not None:
                starts = [at, *(at + width * (i + 1) for i in outcome.path)]
                scored = zip(starts, outcome.token_ids, strict=True)
                logprobs = tuple(read(values[s : s + width], token_id, r.logprobs) for s, token_id in scored)
                outcome = replace(outcome, logprobs=logprobs)
                at += width * (len(r.draft_token_ids) + 1)
            if values[2 * count + b]:
                outcomes.append(outcome)
            else:
                outcomes.append(Outcome(0, (), error=_explain(r, end, logits)))
        return outcomes


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of the logits; the logits themselves where that is all of them in order."""
    if len(rows) == logits.shape[0] and all(i == row for i, row in enumerate(rows)):
        return logits
    return logits.index_select(0, send(rows, logits.device))


def _bonus_by_place(r: Round, num_tokens: int) -> list[float]:
    """Numbers of the bonus draw of each place of a tree, keyed by where the token stands; padded to ``num_tokens``."""
    count = len(r.draft_token_ids)
    counts = [len(r.path_to(place)) for place in range(count + 1)]
    by_count = [r.state.uniforms(Stream.BONUS, len(r.state) + n)[0] for n in range(max(counts) + 1)]
    return [*(by_count[n] for n in counts), *[0.5] * (num_tokens - count)]


def _explain(r: Round, end: int, logits: Tensor) -> TandemError:
    row, position = logits[r.start_row + end], len(r.state) + len(r.path_to(end))
    if bool(row.isnan().any() | row.isposinf().any()):
        return InternalError(f"the model's logits at position {position} are not finite")
    return InvalidRequest(
        f"the request's parameters (allowed_token_ids, bad_words, min_tokens, logit_bias) forbid every token at "
        f"position {position}"
    )
