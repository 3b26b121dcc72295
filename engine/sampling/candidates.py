"""The likeliest next tokens of a draft, for trees: which tokens, and how likely each is to be the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.sampling.distribution import MAX_NUMBERS, Distribution, distribution
from engine.sampling.draws import race
from engine.sampling.edits import edited
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.rules import Rule

#: A race is normalised over so many times the tokens wanted, at most 64: the other tokens together hardly ever matter.
RACED: Final = 4
_MOST_RACED: Final = 64


#: Ids and log-probabilities.
Likeliest: TypeAlias = tuple[Tensor, Tensor]


class RowKind(NamedTuple):
    """Rows that are computed in one batch; rows that truncate are separate from rows that do not."""

    is_greedy: bool
    shares_noise: bool
    truncates: bool

    @classmethod
    def of(cls, state: SamplingState, rule: Rule) -> RowKind:
        """Of a session's rows."""
        if state.params.greedy:
            return cls(True, False, False)
        return cls(False, rule.sampling.shares_noise, state.truncates)


#: The likeliest tokens of rows of one kind, whose logits are edited: so many.
Find: TypeAlias = Callable[[RowKind, Tensor, Rows, int], Likeliest]


def candidates(logits: Tensor, rows: Rows, rules: Sequence[Rule], count: int, find: Find | None = None) -> Likeliest:
    """Token ids int64 [R, count], the likeliest first, and their log-probabilities float64 [R, count] (-inf where fewer
    tokens can be drawn), on the device; ``logits`` float32 [R, V] raw, ``rules`` those of the rows.

    A token's probability is the draft's estimate that the target emits it there. At temperature 0 it is the softmax of
    the edited logits; if the rule shares noise, the target's token is argmax_v p_v / E_v with E known here, so tokens
    are ranked by q_v / E_v, normalised over the best few; otherwise it is q, after all transforms. ``find``: what finds
    them in place of :func:`find_likeliest`.
    """
    find = find or find_likeliest
    logits = edited(logits, rows)
    count = min(count, logits.shape[1])
    of_kind: dict[RowKind, list[int]] = {}
    for i, (state, rule) in enumerate(zip(rows.states, rules, strict=True)):
        of_kind.setdefault(RowKind.of(state, rule), []).append(i)
    most = max(1, MAX_NUMBERS // logits.shape[1])
    parts = [(kind, own[i : i + most]) for kind, own in of_kind.items() for i in range(0, len(own), most)]
    if len(parts) == 1:
        return find(parts[0][0], logits, rows, count)
    token_ids = torch.zeros(len(rows), count, dtype=torch.int64, device=logits.device)
    logprobs = torch.zeros(len(rows), count, dtype=torch.float64, device=logits.device)
    for kind, indices in parts:
        at = send(indices, logits.device)
        some_ids, some_logprobs = find(kind, logits.index_select(0, at), rows.select(indices), count)
        token_ids.index_copy_(0, at, some_ids)
        logprobs.index_copy_(0, at, some_logprobs)
    return token_ids, logprobs


def find_likeliest(kind: RowKind, logits: Tensor, rows: Rows, count: int) -> Likeliest:
    """Those of rows of one kind, by torch's operations; the logits are edited."""
    if kind.is_greedy:
        return largest(logits, count)
    q = distribution(logits, rows)
    if not kind.shares_noise:
        return heaviest(q, q.weights, count)
    keys = [s.noise_key(Stream.COUPLING, at) for s, at in zip(rows.states, rows.positions, strict=True)]
    return heaviest(q, race(q, send(keys, logits.device)), count, is_race=True)


def largest(logits: Tensor, count: int) -> Likeliest:
    """By the logits."""
    best = logits.topk(count, dim=-1)
    return best.indices, (best.values - logits.logsumexp(-1, keepdim=True)).double()


def heaviest(q: Distribution, weights: Tensor, count: int, *, is_race: bool = False) -> Likeliest:
    """By their weights, float64 [R, S], those of q or of its race."""
    total = weights
    if is_race:
        total = weights.topk(min(RACED * count, _MOST_RACED, weights.shape[1]), dim=-1).values
    best = weights.topk(min(count, weights.shape[1]), dim=-1)
    token_ids, values = q.tokens(best.indices), best.values.log() - total.sum(-1, keepdim=True).log()
    if (missing := count - token_ids.shape[1]) > 0:
        token_ids = torch.nn.functional.pad(token_ids, (0, missing))
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
    return token_ids, values
