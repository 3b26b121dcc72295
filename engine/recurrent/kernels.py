"""What a device may bring for passes through recurrent layers; without it they run in torch."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.recurrent.even import Replacing
from engine.recurrent.plan import StatePlan
from engine.recurrent.state_cache import StateCache


class Scan(Protocol):
    """A pass of a state space model."""

    def __call__(
        self,
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
        """Outputs, float32."""
        ...


class RecurrentKernels(Protocol):
    """The module :mod:`engine.native.recurrent` is such."""

    @property
    def EVEN(self) -> Replacing:
        """What makes the elementwise functions of torch the same for a row in any company, while it is entered."""
        ...

    def convolve(
        self,
        rings: torch.Tensor,
        plan: StatePlan,
        inputs: torch.Tensor,
        *,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor | None:
        """As :func:`engine.recurrent.convolution.convolve`, or None; ``weight`` is float32 [taps, C], ``bias`` too."""
        ...

    def delta_rule(
        self,
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
        ...

    @property
    def mamba2(self) -> Scan:
        """A pass of :class:`engine.recurrent.state_space.Mamba2Scan`; its outputs, float32 [T, H, P]."""
        ...

    @property
    def mamba(self) -> Scan:
        """A pass of :class:`engine.recurrent.state_space.MambaScan`; its outputs, float32 [T, C]."""
        ...
