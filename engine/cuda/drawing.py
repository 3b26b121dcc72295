"""Drafted tokens of a GPU in few launches, where drawing one depends on the logits as they are, or after torch's edits.

Coupled tokens are drawn by kernels in one copy and three launches. Where tokens are drawn from q, or unlikely ones are
dropped, torch's operations are replayed as a graph, between a copy of what differs and one of the result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cuda import choices, graphs
from engine.cuda.choices import Walk
from engine.cuda.graphs import Capture, CudaCapture
from engine.sampling import sparse
from engine.sampling.candidates import Likeliest, RowKind, find_likeliest, heaviest, largest
from engine.sampling.distribution import MAX_NUMBERS, NUM_CANDIDATES, Distribution, RowLimits, of_candidates
from engine.sampling.drafting import Drafted, draft, draft_alike, draft_uniforms, drawn_from_q
from engine.sampling.draws import race, winners
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import SEEDED_RULE, DraftSampling, Rule

logger = logging.getLogger(__name__)

#: Tokens of the vocabulary of the check: more than one part.
_CHECKED_TOKENS = 5000
#: Rows that captured draws are made for.
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
#: Those that are captured at the first draw, others when they first come: the largest first, as others compute in its
#: memory.
_WARM_ROWS: Final = (16, 8, 4, 2, 1)
_KINDS: Final = ((DraftSampling.FROM_Q, True), (DraftSampling.FROM_Q, False), (DraftSampling.SHARED_NOISE, True))
#: A row's temperature, min-p, top-p, number (or key) of its noise, float64, and top-k. With these, whatever the logits,
#: a token is drawn: an index beyond the last would end the process.
_PADDING: Final = 0.5
_NUMBERS: Final = 5


class DrawShape(NamedTuple):
    """What a captured draw is made for."""

    sampling: DraftSampling
    truncates: bool
    num_rows: int
    num_tokens: int
    #: The likeliest tokens of a row that are wanted; 0: one is drawn.
    num_wanted: int = 0

    @property
    def q_width(self) -> int:
        """Tokens that a row of q names; 0: none is sent."""
        return sparse.max_tokens(self.num_tokens) if self.sampling.sends_q and not self.num_wanted else 0

    @property
    def num_results(self) -> int:
        """Numbers that are left of a row."""
        return 2 * self.num_wanted or 1 + 2 * self.q_width

    @property
    def is_known(self) -> bool:
        """Whether there may be a graph for it."""
        draws_once = self.sampling.shares_noise and self.truncates and self.num_tokens > NUM_CANDIDATES
        is_known = self.num_wanted > 0 or self.sampling.sends_q or draws_once
        return is_known and 0 < self.num_rows * self.num_tokens <= MAX_NUMBERS


class _Captured(NamedTuple):
    numbers: Tensor
    replay: Callable[[], object]
    out: Tensor


class CapturedDraws:
    """Draws of one thread that replay graphs, on rows padded to one of a few shapes."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._captured: dict[DrawShape, _Captured | None] = {}
        self._checked: set[DrawShape] = set()
        #: The logits of any shape: they are drawn from one after another.
        self._logits = torch.zeros(MAX_NUMBERS, device=device)

    @property
    def shapes(self) -> list[DrawShape]:
        """What has been captured."""
        return [shape for shape, captured in self._captured.items() if captured is not None]

    def draw(self, sampling: DraftSampling, logits: Tensor, rows: Rows) -> Drafted:
        """:func:`engine.sampling.drafting.draft_alike`; the first draw of a shape is compared with it."""
        shape = shape_of(sampling, rows.states)
        if shape is None:
            return draft_alike(sampling, logits, rows)
        if all(shape.num_tokens != known.num_tokens for known in self._captured):
            for each in (DrawShape(*kind, count, shape.num_tokens) for count in _WARM_ROWS for kind in _KINDS):
                if each.is_known:
                    self._captured_for(each)
        if (captured := self._captured_for(shape)) is None:
            return draft_alike(sampling, logits, rows)
        parts = self._replay(captured, shape, logits, rows).split([1, shape.q_width, shape.q_width], 1)  # type: ignore[no-untyped-call]
        found = Drafted(parts[0][:, 0], *parts[1:]) if shape.q_width else Drafted(parts[0][:, 0])
        if shape not in self._checked:
            wanted = draft_alike(sampling, logits, rows)
            return found if self._is_right(shape, _equal(found, wanted)) else wanted
        return found

    def find(self, kind: RowKind, logits: Tensor, rows: Rows, count: int) -> Likeliest:
        """:func:`engine.sampling.candidates.find_likeliest`, checked in the same way."""
        sampling = DraftSampling.SHARED_NOISE if kind.shares_noise else DraftSampling.FROM_Q
        sampling = DraftSampling.ARGMAX if kind.is_greedy else sampling
        shape = shape_of(sampling, rows.states, count)
        if shape is not None and shape not in self._captured:
            for num_rows in reversed(_ROWS):
                if (each := shape._replace(num_rows=num_rows)).is_known:
                    self._captured_for(each)
        if shape is None or (captured := self._captured_for(shape)) is None:
            return find_likeliest(kind, logits, rows, count)
        token_ids, bits = self._replay(captured, shape, logits, rows).chunk(2, dim=1)
        found = token_ids, bits.view(torch.float64)
        if shape not in self._checked:
            wanted = find_likeliest(kind, logits, rows, count)
            return found if self._is_right(shape, _are_alike(found, wanted)) else wanted
        return found

    def _is_right(self, shape: DrawShape, is_right: bool) -> bool:
        """Note what the comparison of the first draw of a shape said."""
        self._checked.add(shape)
        if not is_right:
            logger.warning("drafts of %s are drawn without a graph: it draws other tokens", shape)
            self._captured[shape] = None
        return is_right

    def _replay(self, captured: _Captured, shape: DrawShape, logits: Tensor, rows: Rows) -> Tensor:
        """What the graph leaves of the rows, int64 [R, num_results]."""
        numbers, replay, out = captured
        staged = torch.zeros(numbers.shape, dtype=torch.int64, pin_memory=numbers.device.type != "cpu")
        fill(staged.numpy(), shape, rows)
        with torch.inference_mode():
            numbers.copy_(staged, non_blocking=True)
            self._logits_of(shape)[: len(rows)].copy_(logits)
            replay()
            return out[: len(rows)].clone()

    def _logits_of(self, shape: DrawShape) -> Tensor:
        return self._logits[: shape.num_rows * shape.num_tokens].view(shape.num_rows, shape.num_tokens)

    def _captured_for(self, shape: DrawShape) -> _Captured | None:
        if shape not in self._captured:
            self._captured[shape] = None  # a capture that fails is not tried again
            try:
                with torch.inference_mode():
                    numbers = padding(shape, self._device)
                    out = numbers.new_zeros(shape.num_rows, shape.num_results)
                    replay = self._capture(lambda: compute(shape, self._logits_of(shape), numbers, out))
            except Exception as error:  # no memory, what cannot be captured, or Triton's own errors
                logger.warning("drafts of %s are drawn without a graph: %s: %s", shape, type(error).__name__, error)
                return None
            self._captured[shape] = None if replay is None else _Captured(numbers, replay, out)
        return self._captured[shape]


def shape_of(sampling: DraftSampling, states: Sequence[SamplingState], num_wanted: int = 0) -> DrawShape | None:
    """The smallest shape that holds rows of these sessions; None: there is none."""
    num_tokens, truncates = states[0].num_tokens, any(state.truncates for state in states)
    most = sparse.max_tokens(num_tokens) if sampling.sends_q and not num_wanted else NUM_CANDIDATES - 1
    truncates = truncates and sampling is not DraftSampling.ARGMAX
    if truncates and any(state.params.top_k > most and state.truncates for state in states):
        return None
    num_rows = next((count for count in _ROWS if count >= len(states)), 0)
    shape = DrawShape(sampling, truncates, num_rows, num_tokens, num_wanted)
    return shape if shape.is_known else None


def padding(shape: DrawShape, device: torch.device) -> Tensor:
    """What a draw of nothing but rows left over reads, int64 [numbers, R]."""
    size = _NUMBERS, shape.num_rows
    return torch.full(size, _PADDING, dtype=torch.float64, device=device).view(torch.int64)


def fill(numbers: npt.NDArray[np.int64], shape: DrawShape, rows: Rows) -> None:
    """Write all that differs from batch to batch, [5, R]."""
    params, count = [state.params for state in rows.states], len(rows)
    real = numbers.view(np.float64)
    real[:] = _PADDING
    real[0, :count] = [p.temperature for p in params]
    real[1, :count] = [p.min_p for p in params]
    real[2, :count] = [p.top_p for p in params]
    if shape.q_width:
        real[3, :count] = [u for (u,) in draft_uniforms(rows)]
    elif shape.sampling.shares_noise:
        numbers[3, :count] = _noise_keys(rows)
    numbers[4, :count] = [p.top_k or shape.num_tokens for p in params]


def compute(shape: DrawShape, logits: Tensor, numbers: Tensor, out: Tensor) -> None:
    """What is captured: from the logits of padded rows to their tokens, and q where it is sent.

    Of tokens that are as likely as the last candidate others may be left out than by torch: any q may be sent.
    """
    real = numbers.view(torch.float64)[:, :, None]
    if shape.num_wanted:
        token_ids, logprobs = _find(shape, logits, numbers)
        out.copy_(torch.cat([token_ids, logprobs.view(torch.int64)], 1))
        return
    limits = RowLimits(real[0], real[1], numbers[4, :, None], real[2]) if shape.truncates else RowLimits(real[0])
    q = of_candidates(logits, limits, min(NUM_CANDIDATES, shape.num_tokens), choices)
    if shape.sampling.sends_q:
        drafted = drawn_from_q(q, real[3])
        assert drafted.q_token_ids is not None
        assert drafted.q_weights is not None
        out.copy_(torch.cat([drafted.token_ids[:, None], drafted.q_token_ids, drafted.q_weights], 1))
        return
    out[:, 0].copy_(q.tokens(winners(q, numbers[3])))


def _find(shape: DrawShape, logits: Tensor, numbers: Tensor) -> Likeliest:
    """The likeliest tokens of the rows."""
    if shape.sampling is DraftSampling.ARGMAX:
        return largest(logits, shape.num_wanted)
    real, is_race = numbers.view(torch.float64)[:, :, None], shape.sampling.shares_noise
    if shape.truncates:
        limits = RowLimits(real[0], real[1], numbers[4, :, None], real[2])
        q = of_candidates(logits, limits, min(NUM_CANDIDATES, shape.num_tokens), choices)
        return heaviest(q, race(q, numbers[3]) if is_race else q.weights, shape.num_wanted, is_race=is_race)
    top = logits.amax(-1, keepdim=True)
    weights = choices.weights(logits, top, real[0], numbers[3] if is_race else None)
    q = Distribution(weights, None, top[:, 0].isfinite(), shape.num_tokens)
    return heaviest(q, weights, shape.num_wanted, is_race=is_race)


def find(kind: RowKind, logits: Tensor, rows: Rows, count: int) -> Likeliest:
    """:func:`engine.sampling.candidates.find_likeliest`, of a thread that may capture by a graph."""
    return (find_likeliest if graphs.is_eager() else draws_of(logits.device).find)(kind, logits, rows, count)


def _noise_keys(rows: Rows) -> list[int]:
    return [
        state.noise_key(Stream.COUPLING, position) for state, position in zip(rows.states, rows.positions, strict=True)
    ]


def _equal(one: Drafted, other: Drafted) -> bool:
    pairs = (
        (one.token_ids, other.token_ids),
        (one.q_token_ids, other.q_token_ids),
        (one.q_weights, other.q_weights),
    )
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _are_alike(one: Likeliest, other: Likeliest) -> bool:
    """Of candidates, where they are any."""
    are_any = other[1] > -torch.inf
    return torch.allclose(one[1], other[1], equal_nan=True) and torch.equal(one[0][are_any], other[0][are_any])


class _Draws(threading.local):
    """Of each thread, as each has a stream and an order of its own."""

    def __init__(self) -> None:
        self.of: dict[torch.device, CapturedDraws] = {}


_draws: Final = _Draws()


def draws_of(device: torch.device) -> CapturedDraws:
    """This thread's."""
    if device not in _draws.of:
        _draws.of[device] = CapturedDraws(CudaCapture(device, of_verdicts=True), device)
    return _draws.of[device]


def draw(logits: Tensor, rows: Rows, rules: Sequence[Rule]) -> Drafted:
    """:func:`engine.sampling.drafting.draft`."""
    kinds = [rule.sampling_at(state.params.temperature) for state, rule in zip(rows.states, rules, strict=True)]
    are_walks = not any(
        kind.sends_q or state.edits or (kind.shares_noise and state.truncates)
        for kind, state in zip(kinds, rows.states, strict=True)
    )
    if are_walks and any(kind.shares_noise for kind in kinds) and _is_right(logits.device):
        return _walked(logits, rows)
    return draft(logits, rows, rules, _alike)


def _alike(sampling: DraftSampling, logits: Tensor, rows: Rows) -> Drafted:
    """A token of rows of one kind, whose logits are edited."""
    if not sampling.shares_noise and not sampling.sends_q:
        return draft_alike(sampling, logits, rows)  # the largest logit is one launch of torch's
    if sampling.shares_noise and not any(state.truncates for state in rows.states) and _is_right(logits.device):
        return _walked(logits, rows)
    if graphs.is_eager():
        return draft_alike(sampling, logits, rows)
    return draws_of(logits.device).draw(sampling, logits, rows)


def _walked(logits: Tensor, rows: Rows) -> Drafted:
    """By the kernels: rows that truncate nothing, some of them greedy."""
    temperatures = [state.params.temperature for state in rows.states]
    walks = [
        Walk([i], (), (), temperature, [key] if temperature else [])
        for i, (temperature, key) in enumerate(zip(temperatures, _noise_keys(rows), strict=True))
    ]
    return Drafted(choices.walk(logits, walks, rows.states[0].num_tokens)[1].long())


@cache
def _is_right(device: torch.device) -> bool:
    """Whether the kernels draw as torch does; else the log says once why not."""
    try:
        with torch.inference_mode():
            logits = torch.randn(4, _CHECKED_TOKENS, generator=torch.Generator().manual_seed(7)).to(device)
            params = [SamplingParams(temperature=i / 2, seed=i) for i in range(4)]
            states = [SamplingState(own, [1], 1, _CHECKED_TOKENS, device=device) for own in params]
            rows = Rows.after(states)
            found = _walked(logits, rows).token_ids.tolist()
            wanted = draft(logits, rows, [SEEDED_RULE] * 4).token_ids.tolist()
    except Exception as error:  # compilers of kernels raise anything
        logger.warning("drafts are drawn without kernels: %s: %s", type(error).__name__, error)
        return False
    if found != wanted:
        logger.warning("drafts are drawn without kernels: they draw other tokens")
    return found == wanted
