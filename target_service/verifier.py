"""The verifier: logits of a tick and the rounds they belong to, in; what each round committed, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.engine.native import library
from specdec.engine.native.sampling_verify import is_well_formed, verify_rounds
from specdec.errors import InternalError, InvalidRequest, TandemError
from specdec.sampling import sparse
from specdec.sampling.distribution import distribution
from specdec.sampling.edits import edited
from specdec.sampling.noise import Stream
from specdec.sampling.rows import Rows
from specdec.sampling.rule import Rule, SparseRow
from specdec.sampling.state import SamplingState
from specdec.sampling.transfer import send
from specdec.sessions import PositionLogprobs
from target_service.logprobs import read, score
from target_service.rules import block, coupled, greedy, token
from target_service.rules.drafts import Drafts, Q, Uniforms


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
    #: Set, and the rest empty, where there was no token to draw: fail this session alone.
    error: TandemError | None = None


def check_draft(token_ids: Sequence[int], q_rows: Sequence[SparseRow], num_tokens: int) -> None:
    """Refuse a proposal no rule can verify, before its tokens reach the model.

    Raises :class:`InvalidRequest` on an id outside 0..num_tokens-1 or a q row that is malformed or could not have
    drawn its token.
    """
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


def _check_range(smallest: int, largest: int, num_tokens: int) -> None:
    if not 0 <= smallest <= largest < num_tokens:
        raise InvalidRequest(f"a proposal names tokens {smallest} to {largest}; tokens are 0 to {num_tokens - 1}")


class Verifier:
    """Turns the logits of one tick into tokens. Stateless; the states of the rounds are read, not advanced.

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
    for r, (accepted, token_id, valid) in zip(rounds, decisions, strict=True):
        if valid:
            outcomes.append(Outcome(accepted, (*r.draft_token_ids[:accepted], token_id)))
        else:
            outcomes.append(Outcome(0, (), error=_explain(r, accepted, logits)))
    if any(r.logprobs is not None for r in rounds):
        _add_logprobs(logits, rounds, outcomes)
    return outcomes


def _add_logprobs(logits: Tensor, rounds: Sequence[Round], outcomes: list[Outcome]) -> None:
    asked = [(r, outcome) for r, outcome in zip(rounds, outcomes, strict=True) if r.logprobs is not None]
    at = [(r.start_row + i, token_id) for r, outcome in asked for i, token_id in enumerate(outcome.token_ids)]
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
    of_kind: dict[tuple[Rule | None, bool], list[int]] = {}
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


def _kind(r: Round) -> tuple[Rule | None, bool]:
    """Rounds of one kind are decided together: greedy ones, or those of one rule that all truncate or all do not."""
    return (None, False) if r.state.params.greedy else (r.rule, r.state.truncates)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Rounds of one kind and their rows, one after the other."""

    rounds: Sequence[Round]
    drafts: Drafts
    rows: Rows
    #: For each row of the group its row in the tick's logits.
    logit_rows: Sequence[int]

    @classmethod
    def of(cls, logits: Tensor, rounds: Sequence[Round]) -> _Group:
        chains = [r.draft_token_ids for r in rounds]
        return cls(
            rounds,
            Drafts.chains(chains, logits.device),
            Rows.along([r.state for r in rounds], chains),
            [r.start_row + i for r in rounds for i in range(len(r.draft_token_ids) + 1)],
        )

    # --- on the device ---

    def decide(self, logits: Tensor) -> list[Tensor]:
        """All that must reach the host, flat float64: accepted, next token and validity, then the log-probabilities."""
        accepted, next_token, valid = self._apply_rule(edited(_pick(logits, self.logit_rows), self.rows))
        decided_here = valid[self.drafts.row_at(accepted)]
        values = [accepted.double(), next_token.double(), decided_here.double()]
        if self._scored_rounds:
            values.append(self._score(logits, accepted, next_token).flatten())
        return values

    def _apply_rule(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Edited logits [r, V] to (accepted [B], next token [B], valid [r])."""
        if self.rounds[0].state.params.greedy:
            return greedy.verify(logits, self.drafts)
        target = distribution(logits, self.rows)
        rule = self.rounds[0].rule
        if rule is Rule.COUPLED:
            positions = zip(self.rows.states, self.rows.positions, strict=True)
            keys = [state.noise_key(Stream.COUPLING, position) for state, position in positions]
            return *coupled.verify(target, self.drafts, send(keys, logits.device)), target.valid
        verify = token.verify if rule is Rule.TOKEN else block.verify
        q = Q.sparse([r.q_rows for r in self.rounds], self.drafts)
        return *verify(target.probabilities(), self.drafts, q, self._uniforms()), target.valid

    def _uniforms(self) -> Uniforms:
        """Acceptance and residual numbers are keyed by where the round starts, and so never serve two rounds.

        A position that is drafted again after a rejection must not meet its old numbers: block verification has
        looked at them to decide where the round ended.
        """
        k = self.drafts.token_ids.shape[1]
        u = [
            r.state.uniforms(Stream.ACCEPT, len(r.state), range(k))
            + r.state.uniforms(Stream.RESIDUAL, len(r.state), range(k))
            + r.state.uniforms(Stream.BONUS, len(r.state) + len(r.draft_token_ids))
            for r in self.rounds
        ]
        numbers = send(u, self.drafts.token_ids.device, torch.float64)  # [B, 2 k + 1]
        return Uniforms(numbers[:, :k], numbers[:, k : 2 * k], numbers[:, 2 * k])

    # --- log-probabilities ---

    @property
    def _scored_rounds(self) -> list[int]:
        return [b for b, r in enumerate(self.rounds) if r.logprobs is not None]

    @property
    def _num_top(self) -> int:
        return max(min(r.logprobs or 0, r.state.num_tokens) for r in self.rounds)

    def _score(self, logits: Tensor, accepted: Tensor, next_token: Tensor) -> Tensor:
        """Packed log-probabilities of all rows of the rounds that ask; rows past the accepted ones mean nothing."""
        padded = torch.cat([self.drafts.token_ids, next_token[:, None]], dim=1)  # [B, k + 1]
        padded.scatter_(1, accepted[:, None], next_token[:, None])
        at = [(b, i) for b in self._scored_rounds for i in range(len(self.rounds[b].draft_token_ids) + 1)]
        b, i = send(at, logits.device).unbind(1)
        picked = logits[send([self.rounds[b].start_row + i for b, i in at], logits.device)]
        return score(picked, padded[b, i], self._num_top, self.rounds[0].state.num_tokens)

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
            accepted = int(values[b])
            token_ids = (*r.draft_token_ids[:accepted], int(values[count + b]))
            logprobs: tuple[PositionLogprobs, ...] = ()
            if r.logprobs is not None:
                starts = range(at, at + width * len(token_ids), width)
                scored = zip(starts, token_ids, strict=True)
                logprobs = tuple(read(values[s : s + width], token_id, r.logprobs) for s, token_id in scored)
                at += width * (len(r.draft_token_ids) + 1)
            if values[2 * count + b]:
                outcomes.append(Outcome(accepted, token_ids, logprobs))
            else:
                outcomes.append(Outcome(0, (), error=_explain(r, accepted, logits)))
        return outcomes


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of the logits; the logits themselves where that is all of them in order."""
    if len(rows) == logits.shape[0] and all(i == row for i, row in enumerate(rows)):
        return logits
    return logits.index_select(0, send(rows, logits.device))


def _explain(r: Round, accepted: int, logits: Tensor) -> TandemError:
    row = logits[r.start_row + accepted]
    if bool(row.isnan().any() | row.isposinf().any()):
        return InternalError(f"the model's logits at position {len(r.state) + accepted} are not finite")
    return InvalidRequest(
        f"the request's parameters (allowed_token_ids, bad_words, min_tokens, logit_bias) forbid every token at "
        f"position {len(r.state) + accepted}"
    )
