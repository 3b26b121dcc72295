"""What a draft head does first with the target's states, position by position, so that the target can do it instead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class StateMap(nn.Module):
    """Norms, a linear layer, and a norm: from the states of several layers [..., layers * Ht] to features [..., H]."""

    def __init__(
        self,
        layers: tuple[int, ...],
        linear: nn.Linear,
        norms: Sequence[Iterable[nn.Module]] = (),
        norm: nn.Module | None = None,
    ) -> None:
        """``layers``: the states it reads. ``norms``: before the linear layer, one stage after the other, each of which
        has a norm for every equal part of its input; ``norm``: after it. All are shared with the head.
        """
        super().__init__()
        self.layers = layers
        self.norms = nn.ModuleList(nn.ModuleList(stage) for stage in norms)
        self.linear = linear
        self.norm = norm

    @property
    def width(self) -> int:
        """H."""
        return self.linear.out_features

    def forward(self, states: Tensor) -> Tensor:
        """[..., layers * Ht] to [..., H]."""
        for stage in self.norms:
            assert isinstance(stage, nn.ModuleList)
            parts = states.chunk(len(stage), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(stage, parts, strict=True)], dim=-1)
        out: Tensor = self.linear(states)
        return out if self.norm is None else self.norm(out)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the layers and the tensors: maps of equal prints give equal features."""
        digest = hashlib.sha256(repr((self.layers, [len(list(stage.children())) for stage in self.norms])).encode())
        for name, tensor in self.state_dict().items():
            eps = getattr(self.get_submodule(name.rpartition(".")[0]), "eps", None)
            digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), eps)).encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
