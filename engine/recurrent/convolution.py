"""Causal convolutions over the entries of a sequence, channel by channel: their state is their last inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from engine.recurrent.plan import StatePlan
from engine.recurrent.slots import NUM_RECORDS


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """One convolution: its channels, its taps, and what it reads."""

    channels: int
    taps: int
    dtype: torch.dtype

    @property
    def ring_size(self) -> int:
        """Inputs that are kept: those that the first row after the longest rollback reads."""
        return self.taps - 1 + NUM_RECORDS

    @property
    def bytes_per_slot(self) -> int:
        """Bytes a sequence takes."""
        return self.ring_size * self.channels * self.dtype.itemsize

    def allocate(self, num_slots: int, device: torch.device) -> torch.Tensor:
        """Rings of raw inputs [slots + 1, ring_size, channels]; the input of entry e is at e % ring_size."""
        return torch.empty(num_slots + 1, self.ring_size, self.channels, dtype=self.dtype, device=device)


def convolve(
    rings: torch.Tensor,
    plan: StatePlan,
    inputs: torch.Tensor,
    *,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Rows [T, C] of ``inputs`` convolved with ``weight`` [C, taps], whose last tap is the row itself; [T, C].

    Products are added in float32, in order of the entries, so a row does not depend on the others of its pass.
    """
    taps, size = weight.shape[1], rings.shape[1]
    flat = rings.flatten(0, 1)
    older, reads = plan.windows(taps, size)
    known = torch.cat((inputs.new_zeros(1, inputs.shape[1]), flat[older], inputs)).to(weight.dtype).float()
    kernel = weight.float()
    out = known[reads[:, 0]] * kernel[:, 0]
    for tap in range(1, taps):
        out = out + known[reads[:, tap]] * kernel[:, tap]
    if bias is not None:
        out = out + bias.float()
    out = out.to(weight.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
    places, rows = plan.last_inputs(size)
    flat[places] = inputs[rows]
    return out.to(inputs.dtype)
