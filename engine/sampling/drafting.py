"""The draft's side of sampling: one drafted token per session, for the rule that will verify it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.sampling import sparse
from engine.sampling.distribution import MAX_NUMBERS, Distribution, distribution, head
from engine.sampling.draws import winners
from engine.sampling.edits import edited
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.params import SamplingParams
from specdec.rules import SEEDED_RULE, DraftSampling, Rule, SparseRow


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """One drafted token per row, still on the device."""

    #: int64 [R].
    token_ids: Tensor
    #: int64 [R, K], or None if no row sends q.
    q_token_ids: Tensor | None = None
    #: int64 [R, K], cubes up to ``sparse.NUM_LEVELS**3``, or 0; all 0 in rows that send no q.
    q_weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """The drafted tokens of one session, in Python."""

    token_ids: tuple[int, ...]
    #: Empty, or one per token.
    q_rows: tuple[SparseRow, ...] = ()


class _DraftKind(NamedTuple):
    """Rows that are drawn in one batch."""

    sampling: DraftSampling
    #: False where it makes no difference.
    truncates: bool

    @classmethod
    def of(cls, state: SamplingState, rule: Rule) -> _DraftKind:
        sampling = rule.sampling_at(state.params.temperature)
        return cls(sampling, sampling.shares_noise and state.truncates)


#: Draws a token of each of some rows that are drawn alike, whose logits are edited.
DrawAlike: TypeAlias = Callable[[DraftSampling, Tensor, Rows], Drafted]


def draft(logits: Tensor, rows: Rows, rules: Sequence[Rule], alike: DrawAlike | None = None) -> Drafted:
    """Draw one token per row of ``logits`` (float32 [R, V]); ``rules`` are those of the rows. Nothing syncs on CUDA.

    How a row is drawn is its rule's :class:`~specdec.rules.DraftSampling`. FROM_Q draws from the quantised top of q,
    which comes with the token. If all tokens of a row are masked, it gets a token that the target will reject. The rows
    of the next step are ``rows.extended(drafted.token_ids)``. ``alike``: what draws in place of :func:`draft_alike`.
    """
    alike = alike or draft_alike
    logits = edited(logits, rows)
    of_kind: dict[_DraftKind, list[int]] = {}
    for i, (state, rule) in enumerate(zip(rows.states, rules, strict=True)):
        of_kind.setdefault(_DraftKind.of(state, rule), []).append(i)
    count = max(1, MAX_NUMBERS // logits.shape[1])
    parts = [(kind, own[i : i + count]) for kind, own in of_kind.items() for i in range(0, len(own), count)]
    if len(parts) == 1:
        return alike(parts[0][0].sampling, logits, rows)

    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    width = sparse.max_tokens(logits.shape[1])
    sends_q = any(kind.sampling.sends_q for kind in of_kind)
    q_token_ids, q_weights = token_ids.new_zeros(2, len(rows), width) if sends_q else (None, None)
    for kind, indices in parts:
        at = send(indices, logits.device)
        part = alike(kind.sampling, logits.index_select(0, at), rows.select(indices))
        for whole, values in (
            (token_ids, part.token_ids),
            (q_token_ids, part.q_token_ids),
            (q_weights, part.q_weights),
        ):
            if whole is not None and values is not None:
                whole.index_copy_(0, at, values)
    return Drafted(token_ids, q_token_ids, q_weights)


def draft_many(logits: Tensor) -> None:
    """Draw tokens of all rows of ``logits`` float32 [R, V] in the way that needs the most memory."""
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, seed=0)
    states = [SamplingState(params, [0], 1, logits.shape[1], device=logits.device)] * len(logits)
    draft(logits, Rows.after(states), [SEEDED_RULE] * len(logits))


def collect(steps: Sequence[Drafted], counts: Sequence[int] | None = None) -> list[DraftedChain]:
    """Bring the drafted tokens of successive steps (the same rows in each) to Python, in one transfer.

    ``counts`` cuts each chain to its own length.
    """
    if not steps:
        return [] if counts is None else [DraftedChain(())] * len(counts)
    q_width = max(0 if step.q_weights is None else step.q_weights.shape[1] for step in steps)
    num_rows = steps[0].token_ids.shape[0]
    nothing = steps[0].token_ids.new_zeros(num_rows, q_width)
    packed = torch.stack(
        [
            torch.cat(
                [
                    step.token_ids[:, None],
                    nothing if step.q_token_ids is None else step.q_token_ids,
                    nothing if step.q_weights is None else step.q_weights,
                ],
                dim=1,
            )
            for step in steps
        ],
        dim=1,
    )  # [R, steps, 1 + 2 q_width]
    host = packed.cpu().numpy()
    chains = []
    for i, chain in enumerate(host):
        kept = chain if counts is None else chain[: counts[i]]
        q_rows = tuple(
            _sparse_row(step[1:][:q_width], weights) for step in kept if (weights := step[1 + q_width :]).any()
        )
        chains.append(DraftedChain(tuple(kept[:, 0].tolist()), q_rows))
    return chains


def draft_alike(sampling: DraftSampling, logits: Tensor, rows: Rows) -> Drafted:
    """Draw a token of each row by torch's operations; the logits are edited."""
    match sampling:
        case DraftSampling.ARGMAX:
            return Drafted(logits.argmax(-1))
        case DraftSampling.FROM_Q:
            return _draft_from_q(logits, rows)
        case DraftSampling.SHARED_NOISE:
            return _draft_with_shared_noise(logits, rows)


def _draft_with_shared_noise(logits: Tensor, rows: Rows) -> Drafted:
    q = distribution(logits, rows)
    keys = [
        state.noise_key(Stream.COUPLING, position) for state, position in zip(rows.states, rows.positions, strict=True)
    ]
    return Drafted(q.tokens(winners(q, send(keys, logits.device))))


def _draft_from_q(logits: Tensor, rows: Rows) -> Drafted:
    # Top-p is a share of what top-k keeps, and that may be more than a row can name.
    q = head(logits, rows, max(sparse.max_tokens(logits.shape[1]), *(state.params.top_k for state in rows.states)))
    return drawn_from_q(q, send(draft_uniforms(rows), logits.device, torch.float64))


def draft_uniforms(rows: Rows) -> list[list[float]]:
    """Of each row the number its token is drawn from q with, [R, 1]."""
    return [
        state.uniforms(Stream.DRAFT, base, [position - base])
        for state, base, position in zip(rows.states, rows.bases, rows.positions, strict=True)
    ]


def drawn_from_q(q: Distribution, u: Tensor) -> Drafted:
    """Draw from the quantised top of q, whose tokens stand in order; ``u`` float64 [R, 1] in (0, 1)."""
    width = sparse.max_tokens(q.num_tokens)
    assert q.token_ids is not None
    q = Distribution(q.weights[:, :width], q.token_ids[:, :width], q.valid, q.num_tokens)
    assert q.token_ids is not None
    token_ids, order = q.token_ids.sort(-1)  # drawn in the order of the wire
    weights = quantized(q).gather(1, order)
    columns = draw_quantized(weights, u)
    return Drafted(token_ids.gather(1, columns[:, None]).squeeze(1), token_ids, weights)


def quantized(q: Distribution) -> Tensor:
    """Integer weights that replace q, most likely first: int64 [R, K].

    Each is the cube of a rounded root; tokens after the first that hold ``sparse.Q_SHARE`` of the mass have 0. Any q is
    lossless if it is the one that is sent.
    """
    weights = q.weights.nan_to_num(0.0)
    before = weights.cumsum(-1) - weights
    kept = (weights > 0) & (before < sparse.Q_SHARE * weights.sum(-1, keepdim=True))
    kept[:, 0] |= ~q.valid  # nothing to draw: any token will do, the target refuses it
    root = weights.pow(1 / 3).mul_(sparse.NUM_LEVELS).round_().clamp_min_(1).long()
    return root**3 * kept


def draw_quantized(weights: Tensor, u: Tensor) -> Tensor:
    """Columns drawn from exactly weight / sum of weights: ``weights`` int64 [R, K], ``u`` [R, 1] in (0, 1), to [R]."""
    sums = weights.cumsum(-1)
    ticket = (u * sums[:, -1:]).long()  # 0 .. total - 1; u has 52 bits: equally likely to within 2^-52
    return (sums <= ticket).sum(-1)


def _sparse_row(token_ids: sparse.Ids, weights: sparse.Ids) -> SparseRow:
    kept = weights.nonzero()[0]
    return sparse.pack(token_ids[kept], np.cbrt(weights[kept]).round().astype(np.int64) - 1)
