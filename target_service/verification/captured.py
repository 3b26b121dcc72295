"""Verdicts on a GPU with few launches: kernels for texts that depend on no draft, graphs for the rest of the chains.

A captured verdict always runs the same operations on the same memory. So rounds are padded to one of a few shapes, and
all that differs goes to the device in one copy. Rounds whose logits are edited or masked and trees under a ratio rule
are left to :mod:`target_service.verification.tensor_verifier`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.graphs import Capture
from engine.sampling import distribution, sparse
from engine.sampling.distribution import Distribution, RowLimits
from engine.sampling.noise import Stream
from specdec.rules import Rule
from specdec.trees import depths
from target_service.verification.rounds import Round
from target_service.verification.rules.drafts import Drafts, Q, Uniforms
from target_service.verification.rules.inputs import uniforms_of
from target_service.verification.rules.registry import VERIFY

logger = logging.getLogger(__name__)

#: Rounds and drafts of each that captured verdicts are made for.
_ROUNDS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_DRAFTS: Final = (4, 8, 16, 32, 64)

#: What :meth:`GpuVerdicts.kind` gives rounds that the kernels of :mod:`engine.cuda.choices` decide.
WALK: Final = "walk"


class Shape(NamedTuple):
    """What a captured verdict is made for."""

    rule: Rule
    truncates: bool
    num_rounds: int
    num_drafts: int
    #: Tokens that a q row names at most.
    width: int
    num_tokens: int

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
    q_ids: Any  # int64 [B, k, K]
    q_weights: Any  # int64 [B, k, K]
    temperature: Any  # float64 [R]
    min_p: Any  # float64 [R]
    top_p: Any  # float64 [R]
    uniforms: Any  # float64 [B, 2 k + 1]


def _sizes(shape: Shape) -> list[tuple[int, ...]]:
    rows, rounds, k = (shape.num_rows,), shape.num_rounds, shape.num_drafts
    q = (rounds, k, shape.width)
    return [rows, rows, rows, (rounds,), (rounds, k), q, q, rows, rows, rows, (rounds, 2 * k + 1)]


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
    are_trees: bool = False

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
        return Uniforms(numbers[:, :k], numbers[:, k : 2 * k], numbers[:, 2 * k])


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

    def kind(self, r: Round) -> Hashable | None:
        """Rounds of one kind are decided together; None: tensors decide."""
        state = r.state
        if state.edits or r.masks is not None:
            return None
        if self._choices is not None and (
            state.params.greedy or (r.rule.sampling.shares_noise and not state.truncates)
        ):
            return WALK
        fits = state.params.top_k == 0 or state.params.top_k < distribution.NUM_CANDIDATES or not state.truncates
        if self._capture is None or state.params.greedy or r.parents or not fits:
            return None
        return (r.rule, state.truncates)

    def decide(self, kind: Hashable, logits: Tensor, rounds: Sequence[Round]) -> Tensor | None:
        """Rounds of one kind; None: there is no graph for them. ``logits`` float32 [N, V]."""
        if kind != WALK:
            parts = [self._decide_part(part, logits) for part in _parts_of(rounds, logits.shape[1])]
            done = [part for part in parts if part is not None]
            if not done or len(done) < len(parts):
                return None
            return done[0] if len(done) == 1 else torch.cat(done, dim=1)
        assert self._choices is not None
        walks = [_walk_of(r, self._choices) for r in rounds]
        walked: Tensor = self._choices.walk(logits, walks, rounds[0].state.num_tokens)
        return walked

    def _decide_part(self, rounds: Sequence[Round], logits: Tensor) -> Tensor | None:
        captured = None if (shape := _shape_of(rounds)) is None else self._captured_for(shape, logits.shape[1])
        if captured is None or shape is None:
            return None
        buffer, replay, out = captured
        staged = torch.zeros(buffer.shape, dtype=torch.int64, pin_memory=buffer.device.type != "cpu")
        _fill(_parts(staged.numpy(), shape, np.float64), rounds)
        assert self._logits is not None
        with torch.inference_mode():
            buffer.copy_(staged, non_blocking=True)
            torch.index_select(logits, 0, buffer[: shape.num_rows], out=self._logits[: shape.num_rows])
            replay()
            return out[:, : len(rounds)].clone()

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
                    replay = self._capture(lambda: _compute(logits, parts, shape, out))
            except RuntimeError as error:  # there is no memory, or something in it cannot be captured
                logger.warning("verdicts on %d rows run without a CUDA graph: %s", shape.num_rows, error)
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
    return Shape(rounds[0].rule, state.truncates, num_rounds, _num_drafts(rounds), width, state.num_tokens)


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
        if r.rule.sampling.shares_noise:
            parts.noise_keys[rows] = [
                r.state.noise_key(Stream.COUPLING, len(r.state) + step) for step in range(count + 1)
            ]
            continue
        parts.uniforms[b] = uniforms_of(r, num_drafts)
        if not r.q_rows:
            parts.q_ids[b, :count, 0] = r.draft_token_ids
            parts.q_weights[b, :count, 0] = 1
        for i, row in enumerate(r.q_rows):
            ids, weights = sparse.unpack(row)
            parts.q_ids[b, i, : len(ids)], parts.q_weights[b, i, : len(ids)] = ids, weights


def _compute(logits: Tensor, parts: _Parts, shape: Shape, out: Tensor) -> None:
    """What is captured: from the logits of padded chains, float32 [R, V], to the result."""
    steps = torch.arange(shape.num_drafts + 1, device=logits.device)
    firsts = torch.arange(shape.num_rounds, device=logits.device)[:, None] * (shape.num_drafts + 1)
    rows = firsts + torch.minimum(steps, parts.lengths[:, None])
    drafts = Drafts(parts.token_ids, parts.lengths, rows)
    temperature = parts.temperature[:, None]
    if shape.truncates:
        limits = RowLimits(temperature, parts.min_p[:, None], parts.top_k[:, None], parts.top_p[:, None])
        target = distribution.of_candidates(logits, limits, distribution.NUM_CANDIDATES)
    else:
        target = distribution.untruncated(logits, temperature)
    given: Any = _StagedInput(parts, drafts, target)
    end, next_token = VERIFY[shape.rule](given)
    valid = target.valid[drafts.row_at(end)].double()
    if target.complete is not None:
        valid = torch.where(target.complete[rows].all(1), valid, -1.0)
    out.copy_(torch.stack([end.double(), next_token.double(), valid]))


def _walk_of(r: Round, choices: ModuleType) -> object:
    """The walk that decides a round."""
    parents, keys = r.parents or range(-1, len(r.draft_token_ids) - 1), []
    if not r.state.params.greedy:
        steps = (0, *(depth + 1 for depth in depths(parents)))
        keys = [r.state.noise_key(Stream.COUPLING, len(r.state) + step) for step in steps]
    rows = range(r.start_row, r.start_row + len(r.draft_token_ids) + 1)
    return choices.Walk(rows, r.draft_token_ids, parents, r.state.params.temperature, keys)
