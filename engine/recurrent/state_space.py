"""State space models: Mamba2 (Dao and Gu 2024, arXiv 2405.21060) and Mamba (Gu and Dao 2023, arXiv 2312.00752).

Mamba2 has of every head a state S [P, N], of an input x [P] with step dt, and B, C [N] that heads of a group share:

    S = exp(dt A) S + (dt x) Bᵀ;  output S C + D x

Mamba has one of every channel, S [N], with A [N] of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.recurrent.state_cache import Records, Recurrence, StateShape


def mamba2_shape(inputs: torch.Tensor, b: torch.Tensor) -> StateShape:
    """Of inputs [1, T, H, P] and B [1, T, G, N]."""
    (heads, dim), (groups, size) = inputs.shape[2:], b.shape[2:]
    return StateShape((heads, dim, size), {"input": (heads, dim), "b": (groups, size), "decay": (heads,)})


def mamba_shape(inputs: torch.Tensor, b: torch.Tensor) -> StateShape:
    """Of inputs [1, C, T] and B [1, N, T]."""
    channels, size = inputs.shape[1], b.shape[1]
    return StateShape((channels, size), {"step": (channels,), "input": (channels,), "b": (size,)})


def time_steps(dt: torch.Tensor, bias: torch.Tensor | None, *, has_softplus: bool) -> torch.Tensor:
    """Steps as transformers computes them, in their own dtype; ``bias`` is broadcast."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if has_softplus else dt


class Mamba2Scan(Recurrence):
    """Rows of one Mamba2 layer."""

    def __init__(
        self,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        *,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
    ) -> None:
        """Inputs [T, H, P], steps [T, H], A [H], B and C [T, G, N], D [H]; any dtype."""
        inputs, steps = inputs.float(), steps.float()
        self._shared = inputs.shape[1] // b.shape[1]
        self._input, self._b, self._c = inputs * steps[..., None], b.float(), c.float()
        self._decay = (a.float() * steps).exp()
        #: float32 [T, H, P].
        self.outputs = torch.empty_like(inputs)
        self._skipped = None if d is None else d[..., None] * inputs

    @property
    def records(self) -> Records:
        """Input dt x [T, H, P], B [T, G, N], decay exp(dt A) [T, H]."""
        return {"input": self._input, "b": self._b, "decay": self._decay}

    def fold(self, state: torch.Tensor, records: Records) -> torch.Tensor:
        """S = decay S + input Bᵀ."""
        written = records["input"][..., None] * self._of_heads(records["b"])[..., None, :]
        return state * records["decay"][..., None, None] + written

    def run(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A row each, as above."""
        state = self.fold(state, {name: part[rows] for name, part in self.records.items()})
        out = (state * self._of_heads(self._c[rows])[..., None, :]).sum(-1)
        self.outputs[rows] = out if self._skipped is None else out + self._skipped[rows]
        return state

    def _of_heads(self, part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(self._shared, dim=1)


class MambaScan(Recurrence):
    """Rows of one Mamba layer."""

    def __init__(
        self,
        inputs: torch.Tensor,
        steps: torch.Tensor,
        *,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
    ) -> None:
        """Inputs and steps [T, C], A [C, N], B and C [T, N], D [C]; any dtype."""
        self._a = a.float()
        self._input, self._steps, self._b, self._c = (part.float() for part in (inputs, steps, b, c))
        #: float32 [T, C].
        self.outputs = torch.empty_like(self._input)
        self._skipped = None if d is None else self._input * d

    @property
    def records(self) -> Records:
        """Step [T, C], input [T, C], B [T, N]."""
        return {"step": self._steps, "input": self._input, "b": self._b}

    def fold(self, state: torch.Tensor, records: Records) -> torch.Tensor:
        """S = exp(dt A) S + dt B x."""
        step, b = records["step"][..., None], records["b"][:, None]
        return (self._a * step).exp() * state + step * b * records["input"][..., None]

    def run(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A row each, as above."""
        state = self.fold(state, {name: part[rows] for name, part in self.records.items()})
        out = (state * self._c[rows][:, None]).sum(-1)
        self.outputs[rows] = out if self._skipped is None else out + self._skipped[rows]
        return state
