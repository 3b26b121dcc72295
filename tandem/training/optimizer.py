"""Muon for the hidden matrices, AdamW for embeddings, output layers and norms, stepped as one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class OptimizerSettings:
    """Peak learning rates. Muon's update is scaled to AdamW's RMS (Liu et al. 2025)."""

    matrix_rate: float = 3e-3
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0


class PairedOptimizer:
    """Both optimizers behind one `step(factor)`."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings, vocab_sizes: Collection[int]) -> None:
        """`vocab_sizes` tell embeddings and output layers, which have one of them as a dimension, from matrices."""
        self.settings = settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.parameters if p.ndim == 2 and not set(p.shape) & set(vocab_sizes)]
        known = {id(p) for p in matrices}
        others = [p for p in self.parameters if id(p) not in known]
        self.optimizers: Sequence[torch.optim.Optimizer] = (
            torch.optim.Muon(
                matrices,
                lr=settings.matrix_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.rates = (settings.matrix_rate, settings.other_rate)

    def step(self, factor: float) -> float:
        """Clips, updates with the rates times `factor`, clears; returns the gradient norm."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.max_norm)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm.item()

    def state_dict(self) -> list[dict[str, Any]]:
        """The states of both."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restores what `state_dict` gave."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
