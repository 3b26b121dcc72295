"""Verdicts on a GPU with few launches: kernels for texts that depend on no draft, graphs for the rest.

A captured verdict always runs the same operations on the same memory. So rounds are padded to one of a few shapes, and
all that differs goes to the device in one copy. Logits are edited before the verdict, and masked by a kernel.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.graphs import Capture
from engine.sampling import distribution, sparse
from engine.sampling.distribution import Distribution, RowLimits
from engine.sampling.edits import edited
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.transfer import send
from specdec.rules import Rule
from specdec.trees import depths
from target_service.verification.rounds import Round
from target_service.verification.rules.drafts import Drafts, Q, Siblings, Uniforms
from target_service.verification.rules.inputs import uniforms_of
from target_service.verification.rules.registry import VERIFY

logger = logging.getLogger(__name__)

#: Rounds and drafts of each that captured verdicts are made for.
_ROUNDS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_DRAFTS: Final = (4, 8, 16, 32, 64)

#: Siblings of trees that captured verdicts are made for.
_SIBLINGS: Final = (4, 8, 16, 64)


class Kind(NamedTuple):
    """Rounds of one kind are decided together."""

    #: None: the kernels of :mod:`engine.cuda.choices` decide.
    rule: Rule | None
    truncates: bool = False
    are_trees: bool = False
    are_edited: bool = False


#: What needs no memory of the size of the logits.
WALK: Final = Kind(None)


class Shape(NamedTuple):
    """What a captured verdict is made for."""

    rule: Rule
    truncates: bool
    num_rounds: int
    num_drafts: int
    #: Tokens that a q row names at most.
    width: int
    num_tokens: int
    #: Siblings at most; 0: chains.
    num_siblings: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of logits: those of a round lie one after another, padded."""
        return self.num_rounds * (self.num_drafts + 1)


class _Parts(NamedTuple):
    """What a captured verdict reads, as views of one buffer of int64, on the host or on the device."""

    logit_rows: Any  # int64 [R]
    noise_keys: Any  # int64 [R]
    top_k: Any  # int64 [R]
    lengths: Any  # int64 [B]
    token_ids: Any  # int64 [B, k]
    q_ids: Any  # int64 [B, k, K]; of trees [B, k + 1, K]
    q_weights: Any  # the same
    parents: Any  # int64 [B, k] of trees, else empty
    members: Any  # int64 [B, k + 1, m] of trees, else empty
    temperature: Any  # float64 [R]
    min_p: Any  # float64 [R]
    top_p: Any  # float64 [R]
    uniforms: Any  # float64 [B, 2 k + 1]; of trees [B, 3 k + 1]


def _sizes(shape: Shape) -> list[tuple[int, ...]]:
    rows, rounds, k = (shape.num_rows,), shape.num_rounds, shape.num_drafts
    is_tree = int(shape.num_siblings > 0)
    q = (rounds, k + is_tree, shape.width)
    trees = [(rounds, k * is_tree), (rounds, k + 1, shape.num_siblings)]
    uniforms = (rounds, (2 + is_tree) * k + 1)
    return [rows, rows, rows, (rounds,), (rounds, k), q, q, *trees, rows, rows, rows, uniforms]


def _parts(buffer: Any, shape: Shape, float64: Any) -> _Parts:
    views, at = [], 0
    for i, size in enumerate(_sizes(shape)):
        count = int(np.prod(size))
        part = buffer[at : at + count]
        views.append((part if i < _Parts._fields.index("temperature") else part.view(float64)).reshape(size))
        at += count
    return _Parts(*views)


@dataclass(frozen=True, slots=True, eq=False)
class _StagedInput:
    """What a rule is given (:class:`~target_service.verification.rules.inputs.RuleInput`), from a buffer."""

    parts: _Parts
    drafts: Drafts
    target: Distribution

    @property
    def are_trees(self) -> bool:
        """Whether the rounds are trees."""
        return self.drafts.parents is not None

    def siblings(self) -> Siblings:
        """Of trees."""
        return Siblings.packed(self.parts.members, self.parts.q_ids, self.parts.q_weights)

    def q(self) -> Q:
        """As sent; rounds without q rows have one-hot ones."""
        weights = self.parts.q_weights.double()
        return Q(self.parts.q_ids, weights / weights.sum(-1, keepdim=True).clamp_min_(1.0))

    def noise_keys(self, stream: Stream) -> Tensor:
        """Of the coupled rule."""
        assert stream is Stream.COUPLING
        keys: Tensor = self.parts.noise_keys
        return keys

    def uniforms(self) -> Uniforms:
        """Of the ratio rules."""
        numbers, k = self.parts.uniforms, self.drafts.token_ids.shape[1]
        bonus = numbers[:, 2 * k :] if self.are_trees else numbers[:, 2 * k]
        return Uniforms(numbers[:, :k], numbers[:, k : 2 * k], bonus)


class GpuVerdicts:
    """Decides what it knows on a device; all its results are float64 [3, B] there: the place where each walk ends, the
    next token, and whether it is valid (-1: not known).
    """

    def __init__(self, choices: ModuleType | None, capture: Capture | None, device: torch.device) -> None:
        """``choices``: :mod:`engine.cuda.choices`; either may be missing."""
        self._choices, self._capture = choices, capture
        self._device = device
        self._captured: dict[Shape, tuple[Tensor, Callable[[], object], Tensor] | None] = {}
        #: Of captured verdicts, which run one after another.
        self._logits: Tensor | None = None

    def __str__(self) -> str:
        """For the log."""
        return "kernels" if self._capture is None else "graphs"

    @property
    def shapes(self) -> list[Shape]:
        """What has been captured."""
        return [shape for shape, captured in self._captured.items() if captured is not None]

    def kind(self, r: Round) -> Kind | None:
        """Of a round; None: tensors decide."""
        state, are_edited = r.state, bool(r.state.edits)
        if self._choices is not None and (
            state.params.greedy or (r.rule.sampling.shares_noise and not state.truncates)
        ):
            return WALK._replace(are_edited=are_edited)
        fits = state.params.top_k == 0 or state.params.top_k < distribution.NUM_CANDIDATES or not state.truncates
        can_mask = r.masks is None or self._choices is not None
        if self._capture is None or state.params.greedy or not fits or not can_mask:
            return None
        return Kind(r.rule, state.truncates, len(r.parents) > 0, are_edited)

    def decide(self, kind: Kind, logits: Tensor, rounds: Sequence[Round]) -> Tensor | None:
        """Rounds of one kind; None: there is no graph for them. ``logits`` float32 [N, V]."""
        vocab_size = logits.shape[1]
        if kind.are_edited:
            logits, rounds = _edited(logits, rounds)
        if kind.rule is not None:
            parts = [self._decide_part(part, logits, vocab_size) for part in _parts_of(rounds, vocab_size)]
            done = [part for part in parts if part is not None]
            if not done or len(done) < len(parts):
                return None
            return done[0] if len(done) == 1 else torch.cat(done, dim=1)
        assert self._choices is not None
        walks = [_walk_of(r, self._choices) for r in rounds]
        walked: Tensor = self._choices.walk(logits, walks, rounds[0].state.num_tokens)
        return walked

    def _decide_part(self, rounds: Sequence[Round], logits: Tensor, vocab_size: int) -> Tensor | None:
        captured = None if (shape := _shape_of(rounds)) is None else self._captured_for(shape, vocab_size)
        if captured is None or shape is None:
            return None
        buffer, replay, out = captured
        staged = torch.zeros(buffer.shape, dtype=torch.int64, pin_memory=buffer.device.type != "cpu")
        _fill(_parts(staged.numpy(), shape, np.float64), rounds)
        assert self._logits is not None
        with torch.inference_mode():
            buffer.copy_(staged, non_blocking=True)
            own = self._logits[: shape.num_rows, : logits.shape[1]]
            torch.index_select(logits, 0, buffer[: shape.num_rows], out=own)
            self._forbid(own, rounds, shape)
            replay()
            return out[:, : len(rounds)].clone()

    def _forbid(self, logits: Tensor, rounds: Sequence[Round], shape: Shape) -> None:
        """Apply the masks of rounds to their padded rows."""
        masks = {b: r.masks for b, r in enumerate(rounds) if r.masks is not None}
        if masks:
            assert self._choices is not None
            rows = [b * (shape.num_drafts + 1) + i for b, own in masks.items() for i in range(len(own))]
            self._choices.forbid(logits, rows, list(masks.values()), shape.num_tokens)

    def _captured_for(self, shape: Shape, vocab_size: int) -> tuple[Tensor, Callable[[], object], Tensor] | None:
        if shape not in self._captured:
            self._captured[shape] = None  # a capture that fails is not tried again
            assert self._capture is not None
            try:
                with torch.inference_mode():
                    if self._logits is None:
                        self._logits = torch.zeros(_max_rows(vocab_size), vocab_size, device=self._device)
                    logits = self._logits[: shape.num_rows, : shape.num_tokens]
                    size = sum(int(np.prod(part)) for part in _sizes(shape))
                    buffer = torch.zeros(size, dtype=torch.int64, device=self._device)
                    parts = _parts(buffer, shape, torch.float64)
                    parts.temperature.fill_(1.0)
                    out = torch.zeros(3, shape.num_rounds, dtype=torch.float64, device=self._device)
                    replay = self._capture(lambda: _compute(logits, parts, shape, out, self._choices))
            except Exception as error:  # no memory, what cannot be captured, or Triton's own errors
                why = type(error).__name__, error
                logger.warning("verdicts on %d rows run without a CUDA graph: %s: %s", shape.num_rows, *why)
                return None
            self._captured[shape] = None if replay is None else (buffer, replay, out)
        return self._captured[shape]


def _max_rows(vocab_size: int) -> int:
    return max(1, min(distribution.MAX_NUMBERS // vocab_size, _ROUNDS[-1] * (_DRAFTS[-1] + 1)))


def _parts_of(rounds: Sequence[Round], vocab_size: int) -> list[Sequence[Round]]:
    """As many at a time as a captured verdict holds; none where one is too large."""
    num_rows = _num_drafts(rounds) + 1
    size = max((count for count in _ROUNDS if count * num_rows <= _max_rows(vocab_size)), default=0)
    return [rounds[i : i + size] for i in range(0, len(rounds), size)] if size else []


def _num_drafts(rounds: Sequence[Round]) -> int:
    most = max(len(r.draft_token_ids) for r in rounds)
    return next(count for count in _DRAFTS if count >= most)


def _shape_of(rounds: Sequence[Round]) -> Shape | None:
    """The smallest shape that holds the rounds; None: there are no more tokens than candidates."""
    state = rounds[0].state
    if state.truncates and state.num_tokens <= distribution.NUM_CANDIDATES:
        return None
    num_rounds = next(count for count in _ROUNDS if count >= len(rounds))
    width = sparse.max_tokens(state.num_tokens) if any(r.q_rows for r in rounds) else 1
    num_siblings = 0
    if rounds[0].parents:
        most = 1 if rounds[0].rule.sampling.shares_noise else max(max(Counter(r.parents).values()) for r in rounds)
        num_siblings = next(count for count in _SIBLINGS if count >= most)
        width = max(width, num_siblings)
    return Shape(
        rounds[0].rule, state.truncates, num_rounds, _num_drafts(rounds), width, state.num_tokens, num_siblings
    )


def _edited(logits: Tensor, rounds: Sequence[Round]) -> tuple[Tensor, Sequence[Round]]:
    """Edited logits [r, num_tokens] of the rounds' rows, and the rounds on them."""
    counts = [len(r.draft_token_ids) + 1 for r in rounds]
    at = send([r.start_row + i for r, count in zip(rounds, counts, strict=True) for i in range(count)], logits.device)
    rows = Rows.along([r.state for r in rounds], [r.draft_token_ids for r in rounds], [r.parents for r in rounds])
    starts = accumulate(counts, initial=0)
    return edited(logits.index_select(0, at), rows), [
        replace(r, start_row=start) for r, start in zip(rounds, starts, strict=False)
    ]


def _fill(parts: _Parts, rounds: Sequence[Round]) -> None:
    """Write all that differs from batch to batch; arrays of zeros come in."""
    parts.temperature[:] = parts.top_p[:] = 1.0
    parts.top_k[:] = np.iinfo(np.int64).max
    num_drafts = parts.token_ids.shape[1]
    for b, r in enumerate(rounds):
        count, params = len(r.draft_token_ids), r.state.params
        rows = slice(b * (num_drafts + 1), b * (num_drafts + 1) + count + 1)
        parts.logit_rows[rows] = range(r.start_row, r.start_row + count + 1)
        parts.temperature[rows], parts.min_p[rows], parts.top_p[rows] = params.temperature, params.min_p, params.top_p
        if params.top_k:
            parts.top_k[rows] = params.top_k
        parts.lengths[b] = count
        parts.token_ids[b, :count] = r.draft_token_ids
        if r.parents:
            parts.parents[b] = [*r.parents, *[-1] * (num_drafts - count)]
        if r.rule.sampling.shares_noise:
            parts.noise_keys[rows] = _noise_keys(r)
            continue
        parts.uniforms[b] = uniforms_of(r, num_drafts)
        if r.parents:
            tried, (ids, weights) = Siblings.arrays([r.draft_token_ids], [r.parents], [r.q_rows], num_drafts + 1)
            parts.members[b], parts.q_ids[b] = -1, -1
            parts.members[b, :, : tried.shape[2]] = tried[0]
            parts.q_ids[b, :, : ids.shape[2]], parts.q_weights[b, :, : ids.shape[2]] = ids[0], weights[0]
            continue
        if not r.q_rows:
            parts.q_ids[b, :count, 0] = r.draft_token_ids
            parts.q_weights[b, :count, 0] = 1
        for i, row in enumerate(r.q_rows):
            ids, weights = sparse.unpack(row)
            parts.q_ids[b, i, : len(ids)], parts.q_weights[b, i, : len(ids)] = ids, weights


def _compute(logits: Tensor, parts: _Parts, shape: Shape, out: Tensor, kernels: Any) -> None:
    """What is captured: from the logits of padded chains, float32 [R, V], to the result."""
    steps = torch.arange(shape.num_drafts + 1, device=logits.device)
    firsts = torch.arange(shape.num_rounds, device=logits.device)[:, None] * (shape.num_drafts + 1)
    rows = firsts + torch.minimum(steps, parts.lengths[:, None])
    drafts = Drafts(parts.token_ids, parts.lengths, rows, parts.parents if shape.num_siblings else None)
    temperature = parts.temperature[:, None]
    if shape.truncates:
        limits = RowLimits(temperature, parts.min_p[:, None], parts.top_k[:, None], parts.top_p[:, None])
        target = distribution.of_candidates(logits, limits, distribution.NUM_CANDIDATES, kernels)
    else:
        target = distribution.untruncated(logits, temperature, kernels)
    given: Any = _StagedInput(parts, drafts, target)
    end, next_token = VERIFY[shape.rule](given)
    valid = target.valid[drafts.row_at(end)].double()
    if target.complete is not None:
        valid = torch.where(target.complete[rows].all(1), valid, -1.0)
    out.copy_(torch.stack([end.double(), next_token.double(), valid]))


def _noise_keys(r: Round) -> list[int]:
    """Of the coupled rule, for each place."""
    steps = (0, *(depth + 1 for depth in depths(r.follows)))
    return [r.state.noise_key(Stream.COUPLING, len(r.state) + step) for step in steps]


def _walk_of(r: Round, choices: ModuleType) -> object:
    """The walk that decides a round."""
    keys = [] if r.state.params.greedy else _noise_keys(r)
    rows = range(r.start_row, r.start_row + len(r.draft_token_ids) + 1)
    return choices.Walk(rows, r.draft_token_ids, r.follows, r.state.params.temperature, keys, r.masks)
