"""From edited logits to distributions: temperature, min-p, top-k and top-p, in vLLM's order, in float64.

A row has one of two forms. If no token is dropped, it has one weight per token of the vocabulary. With top-k, top-p or
min-p it has its surviving tokens only, most likely first: later work (noise, races) then costs as much as there are
survivors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.rows import Rows
from engine.sampling.transfer import send

#: On a CPU, if only top-p or min-p bounds the survivors: tokens examined first, eight times more at each retry.
FIRST_WIDTH = 256
#: Elsewhere, and then all tokens for the few rows whose survivors may be more.
NUM_CANDIDATES = 1024
#: Logits of rows that are computed together, in distributions and what is made of them: 64 MiB of float64 each.
MAX_NUMBERS = 2**23


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """R distributions, unnormalised."""

    #: float64 [R, S]; the most likely token has weight 1, dropped ones 0.
    weights: Tensor
    #: int64 [R, S], no id twice in a row; None: column v is token v.
    token_ids: Tensor | None
    #: bool [R]; False where every token is masked (all weights are 0) or a logit is NaN or inf (they mean nothing).
    valid: Tensor
    #: V.
    num_tokens: int
    #: bool [R]; False where tokens may be missing. None: in no row.
    complete: Tensor | None = None

    def part(self, start: int, stop: int) -> Distribution:
        """Rows ``start`` to ``stop``, as views."""
        ids = None if self.token_ids is None else self.token_ids[start:stop]
        complete = None if self.complete is None else self.complete[start:stop]
        return Distribution(self.weights[start:stop], ids, self.valid[start:stop], self.num_tokens, complete)

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of columns: int64 [R] or [R, n] to the same shape."""
        if self.token_ids is None:
            return columns
        if columns.ndim == 1:
            return self.token_ids.gather(1, columns[:, None]).squeeze(1)
        return self.token_ids.gather(1, columns)

    def probabilities(self) -> Tensor:
        """Normalised, over the whole vocabulary: float64 [R, V]; 0 everywhere in rows without tokens."""
        total = self.weights.sum(-1, keepdim=True)
        p = self.weights / total.clamp_min(1.0)  # a valid row holds a weight of 1
        if self.token_ids is None:
            return p
        return p.new_zeros(p.shape[0], self.num_tokens).scatter_(1, self.token_ids, p)


@dataclass(frozen=True, slots=True, eq=False)
class RowLimits:
    """Temperatures and bounds of R rows on their device, [R, 1] each; None: no row has that bound."""

    #: float64.
    temperature: Tensor
    #: float64; 0 drops nothing.
    min_p: Tensor | None = None
    #: int64; V drops nothing.
    top_k: Tensor | None = None
    #: float64; 1 drops nothing.
    top_p: Tensor | None = None
    #: Whether top-k holds all rows that have a top-p within the tokens looked at: their mass is known then.
    mass_is_seen: bool = False

    @classmethod
    def of(cls, rows: Rows, width: int, num_tokens: int, device: torch.device) -> RowLimits:
        """Those of rows of which ``width`` tokens are looked at."""
        params = [state.params for state in rows.states]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return send([[value] for value in values], device, dtype)

        return cls(
            column([p.temperature for p in params], torch.float64),
            column([p.min_p for p in params], torch.float64) if any(p.min_p > 0 for p in params) else None,
            column([p.top_k or num_tokens for p in params], torch.int64)
            if any(0 < p.top_k <= width for p in params)
            else None,
            column([p.top_p for p in params], torch.float64) if any(p.top_p < 1 for p in params) else None,
            all(p.top_p >= 1 or 0 < p.top_k <= width for p in params),
        )


class WeightKernels(Protocol):
    """What weighs tokens in place of torch: :mod:`engine.cuda.choices`."""

    def weights(self, logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
        """:func:`_weights`."""
        ...

    def mass(self, logits: Tensor, top: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
        """:func:`_mass`."""
        ...


def distribution(logits: Tensor, rows: Rows, *, exact: bool = False) -> Distribution:
    """Distributions of rows with temperature > 0: edited logits float32 [R, V] in.

    Give rows that truncate and rows that do not in separate calls: a call with both examines all tokens. Unless it must
    be ``exact``, a row may lack tokens on a GPU, and says so: whether it does is known there only.
    """
    if not any(state.truncates for state in rows.states):
        temperatures = [[state.params.temperature] for state in rows.states]
        return untruncated(logits, send(temperatures, logits.device, torch.float64))

    ks = [state.params.top_k or logits.shape[1] for state in rows.states]
    width = min(max(ks), logits.shape[1])
    most = max((k for k in ks if k < logits.shape[1]), default=0)  # of rows that top-k bounds
    if _counts_survivors(logits):
        return _shrunk(logits, rows, min(width, most or FIRST_WIDTH))
    few = max(NUM_CANDIDATES, most + 1)
    if exact or width <= few or not all(state.truncates for state in rows.states):
        return head(logits, rows, width)
    return of_candidates(logits, RowLimits.of(rows, few, logits.shape[1], logits.device), few)


def untruncated(logits: Tensor, temperature: Tensor, kernels: WeightKernels | None = None) -> Distribution:
    """All tokens of each row: edited logits float32 [R, V] and float64 [R, 1] in."""
    top = logits.amax(-1, keepdim=True)  # [R, 1]
    weigh = _weights if kernels is None else kernels.weights
    return Distribution(weigh(logits, top, temperature), None, _valid(top), logits.shape[1])


def _counts_survivors(logits: Tensor) -> bool:
    """Whether that needs no transfer."""
    return logits.device.type == "cpu"


def of_candidates(logits: Tensor, limits: RowLimits, width: int, kernels: WeightKernels | None = None) -> Distribution:
    """:func:`head` without the order of all tokens: ``topk`` chooses among equal logits as it likes, so the row is
    complete if none of those that equal the last of the head survives.
    """
    values, ids = logits.topk(width, dim=-1)
    order = _keys(values, ids).argsort(dim=-1, descending=True)
    values, ids = values.gather(1, order), ids.gather(1, order)
    found = _survivors(logits, values, ids, limits, kernels)
    at_the_edge = (found.weights > 0) & (values == values[:, -1:])
    return replace(found, complete=~at_the_edge.any(-1))


def _shrunk(logits: Tensor, rows: Rows, width: int) -> Distribution:
    """:func:`head`, exactly as wide as the row with the most survivors."""
    while True:
        found = head(logits, rows, width)
        num_survivors = max(1, int((found.weights > 0).sum(-1).max()))
        if num_survivors < width or width == logits.shape[1] or _bounded(rows, width):
            ids = found.token_ids
            assert ids is not None
            return Distribution(found.weights[:, :num_survivors], ids[:, :num_survivors], found.valid, found.num_tokens)
        width = min(8 * width, logits.shape[1])


def _bounded(rows: Rows, width: int) -> bool:
    return all(0 < state.params.top_k <= width for state in rows.states)


def head(logits: Tensor, rows: Rows, width: int) -> Distribution:
    """The ``width`` most likely survivors of each row, most likely first: edited logits float32 [R, V] in.

    min-p keeps tokens with at least that share of the largest probability; then top-k keeps exactly k (of equal
    logits the lower ids); then top-p keeps the smallest set of what is left that holds this share of its mass.
    """
    width = min(width, logits.shape[1])
    return _survivors(logits, *_largest(logits, width), RowLimits.of(rows, width, logits.shape[1], logits.device))


def _survivors(
    logits: Tensor, values: Tensor, ids: Tensor, limits: RowLimits, kernels: WeightKernels | None = None
) -> Distribution:
    """Those of the most likely tokens [R, W], in order."""
    num_tokens, width = logits.shape[1], values.shape[1]
    top = logits.amax(-1, keepdim=True)  # [R, 1]; not the first of the head, which may hide a NaN
    weights = _weights(values, top, limits.temperature)  # [R, W]
    if limits.min_p is not None:
        weights = weights * (weights >= limits.min_p)
    if limits.top_k is not None:
        weights = weights * (torch.arange(width, device=logits.device) < limits.top_k)
    if limits.top_p is not None:
        total = weights.sum(-1, keepdim=True)
        if not limits.mass_is_seen:  # that of rows that top-k does not bound lies beyond the head, too
            weigh = _mass if kernels is None else kernels.mass
            whole = weigh(logits, top, limits.temperature, limits.min_p)
            total = whole if limits.top_k is None else torch.where(limits.top_k <= width, total, whole)
        before = weights.cumsum(-1) - weights
        weights = weights * ((before < limits.top_p * total) | (limits.top_p >= 1))
    return Distribution(weights, ids, _valid(top), num_tokens)


def _weights(logits: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - top) / T) in float64, 0 in rows whose top is not finite; ``top`` and ``temperature`` [R, 1]."""
    safe = torch.where(_valid(top)[:, None], top, torch.inf).double()  # -inf - inf is -inf, so every weight is 0
    return logits.double().sub_(safe).div_(temperature).exp_()


def _mass(logits: Tensor, top: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
    """Sums of the weights of all tokens, of those that are at least ``min_p``: float64 [R, 1]."""
    weights = _weights(logits, top, temperature)
    if min_p is not None:
        weights *= weights >= min_p
    return weights.sum(-1, keepdim=True)


def _valid(top: Tensor) -> Tensor:
    return top.squeeze(-1).abs() < torch.inf  # False for a NaN, too


def _largest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` largest logits of each row and their ids, largest first, of equal ones the lower id first.

    ``topk`` leaves open which of equal values it returns, and that may change with the batch or the device. So it is
    given integers without ties: the order of the float in the high half, the complement of the id in the low half.
    """
    keys = _keys(logits, torch.arange(logits.shape[1], device=logits.device))
    ids = 0xFFFFFFFF - (keys.topk(width, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(1, ids), ids


def _keys(logits: Tensor, ids: Tensor) -> Tensor:
    """Integers that sort like the logits, of equal ones the lower id higher."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats sort like these integers
    return (order.long() << 32) | (0xFFFFFFFF - ids)
