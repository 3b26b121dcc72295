"""What all draft heads have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from engine.state_map import StateMap


class DraftHead(nn.Module):
    """A small network on the target's hidden states. Parameters are named as in the published files."""

    #: One of :data:`~specdec.methods.METHODS`.
    method: ClassVar[str]
    #: Its dimensions; all have a ``vocab_size``, the target's.
    config: Any
    #: Of the :attr:`state_map` as the checkpoint has it; empty without one.
    state_map_fingerprint: str = ""

    @property
    def hidden_state_layers(self) -> tuple[int, ...]:
        """The target's hidden states it reads, numbered as transformers numbers them; -1 is after the final norm."""
        return (-1,)

    @property
    def state_map(self) -> StateMap | None:
        """What the target can do with its states in the head's place; None where that makes them no smaller."""
        return None

    @property
    def shared_names(self) -> frozenset[str]:
        """Names of the tensors that are the target's."""
        return frozenset()

    @property
    def dtype(self) -> torch.dtype:
        """That of the head's own weights."""
        return next(self.parameters()).dtype
