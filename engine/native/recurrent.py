"""Recurrent layers by the native kernels: all rows of a pass read a state once, and heads run on several threads.

A row's result is the same to the bit whatever other rows stand in the batch and however many threads run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from engine.native.activations import EvenActivations
from engine.native.library import DTYPES, loaded
from engine.recurrent.plan import StatePlan
from engine.recurrent.slots import NUM_RECORDS
from engine.recurrent.state_cache import StateCache

#: Entered for a pass of modules that are not of these kernels.
EVEN: Final = EvenActivations

_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}


def convolve(
    rings: torch.Tensor,
    plan: StatePlan,
    inputs: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor | None:
    """As :func:`engine.recurrent.convolution.convolve`; None for a dtype or activation it does not know.

    ``weight`` is float32 [taps, C] here, and ``bias`` float32.
    """
    if inputs.dtype not in DTYPES or activation not in _ACTIVATIONS:
        return None
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    out = torch.empty(inputs.shape, dtype=inputs.dtype)
    taps, channels = weight.shape
    loaded().convolve(
        DTYPES[inputs.dtype],
        inputs.data_ptr(),
        inputs.stride(0),
        channels,
        taps,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        _ACTIVATIONS[activation],
        rings.data_ptr(),
        rings.shape[1],
        plan.numbers.data_ptr(),
        len(plan.slots),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def delta_rule(
    cache: StateCache,
    plan: StatePlan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    is_normalised: bool,
) -> torch.Tensor:
    """A pass of :class:`engine.recurrent.delta_rule.DeltaRule`; its outputs, float32 [T, HV, V]."""
    query, key, value, log_decay = (_dense(part) for part in (query, key, value, log_decay))
    inputs = (query, key, value, log_decay, beta.float().contiguous(), _strides(query, key, value, log_decay))
    sizes = (key.shape[1], *value.shape[1:2], key.shape[2], value.shape[2], log_decay.dim() == 3, is_normalised)
    out = value.new_empty(value.shape)
    return _run(loaded().delta_rule, inputs, sizes, cache, ("key", "delta", "decay"), plan=plan, out=out)


def mamba2(
    cache: StateCache,
    plan: StatePlan,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
) -> torch.Tensor:
    """A pass of :class:`engine.recurrent.state_space.Mamba2Scan`; its outputs, float32 [T, H, P]."""
    inputs, b, c = _dense(inputs), _dense(b), _dense(c)
    rows = (inputs, b, c, *_floats(steps, a, d), _strides(inputs, b, c))
    sizes, out = (*inputs.shape[1:], *b.shape[1:]), inputs.new_empty(inputs.shape)
    return _run(loaded().mamba2, rows, sizes, cache, ("input", "b", "decay"), plan=plan, out=out)


def mamba(
    cache: StateCache,
    plan: StatePlan,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    *,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
) -> torch.Tensor:
    """A pass of :class:`engine.recurrent.state_space.MambaScan`; its outputs, float32 [T, C]."""
    rows = _floats(inputs, steps, b, c, a, d)
    out = torch.empty(inputs.shape)
    return _run(loaded().mamba, rows, a.shape, cache, ("step", "input", "b"), plan=plan, out=out)


def _run(
    kernel: Callable[..., int],
    rows: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    cache: StateCache,
    records: Sequence[str],
    *,
    plan: StatePlan,
    out: torch.Tensor,
) -> torch.Tensor:
    """Call a kernel of recurrent.cpp, whose arguments all begin and end alike; ``out``."""
    failed = kernel(
        *(None if part is None else part.data_ptr() for part in rows),
        *sizes,
        *(part.data_ptr() for part in (cache.state, *(cache.records[name] for name in records))),
        plan.numbers.data_ptr(),
        len(plan.slots),
        NUM_RECORDS,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("working memory for recurrent states")
    return out


def _floats(*parts: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Float32 without gaps."""
    return [None if part is None else part.float().contiguous() for part in parts]


def _dense(part: torch.Tensor) -> torch.Tensor:
    """Float32 whose last dimension is dense."""
    part = part.float()
    return part if part.stride(-1) == 1 else part.contiguous()


def _strides(*parts: torch.Tensor) -> torch.Tensor:
    """int64: strides of rows and heads of each part [T, H, …]."""
    strides: Sequence[int] = [stride for part in parts for stride in part.stride()[:2]]
    return torch.tensor(strides, dtype=torch.int64)
