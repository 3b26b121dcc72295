"""Launches of the kernels that work on rows one by one."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from engine.cuda import kernels
from engine.cuda.attention import padded_size
from engine.cuda.float8 import Float8Rows, empty_rows, padded_sizes

#: Numbers of a program of ``silu_multiply``.
_TILE: Final = 1024


def norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``delta`` to ``x`` [T, H] in place, and norm the sum by its root mean square."""
    out = x.new_empty(x.shape)
    _norm(x, delta, weight, eps, out)
    return out


def norm_rounded(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, group: int) -> Float8Rows:
    """The same, rounded in groups."""
    out = empty_rows(x, x.shape[1], group)
    _norm(x, delta, weight, eps, out.codes, scales=out.scales, GROUP=padded_sizes(x.shape[1], group)["GROUP"])
    return out


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, **rounding: object) -> None:
    kernels.add_norm[(len(x),)](
        x,
        x if delta is None else delta,
        weight,
        out,
        eps,
        DIM=x.shape[1],
        PADDED_DIM=padded_size(x.shape[1]),
        HAS_DELTA=delta is not None,
        **rounding,
        num_warps=8,
    )


def silu_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 N], to [T, N]."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    kernels.silu_multiply[(len(out), -(-size // _TILE))](gate_up, out, DIM=size, TILE=_TILE)
    return out
