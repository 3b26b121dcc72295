"""Hidden states from bytes to tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.sessions import HiddenStates


def tensor_of(states: Sequence[HiddenStates]) -> torch.Tensor:
    """[positions, features] on the CPU, bfloat16 where they came so, else float32."""
    parts = [
        torch.frombuffer(bytearray(each.data), dtype=getattr(torch, each.dtype)).view(-1, each.num_features)
        for each in states
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if whole.dtype == torch.bfloat16 else whole.float()


class StateRows:
    """Room for the states of a verdict, with tensors over it that are made once.

    A draft that is to take a tenth of a millisecond has no time for torch's calls, which cold caches make slow.
    """

    def __init__(self, max_rows: int, num_features: int) -> None:
        whole = torch.empty(max_rows, num_features, dtype=torch.bfloat16)
        self._tensors = [whole[:count] for count in range(max_rows + 1)]
        self._bytes = memoryview(whole.view(torch.int16).numpy()).cast("B")  # type: ignore[arg-type]

    def fill(self, states: Sequence[HiddenStates]) -> torch.Tensor:
        """What :func:`tensor_of` gives, here where it fits; that is good until the next call."""
        size = sum(len(each.data) for each in states)
        if size > len(self._bytes) or any(each.dtype != "bfloat16" for each in states):
            return tensor_of(states)
        at = 0
        for each in states:
            self._bytes[at : at + len(each.data)] = each.data
            at += len(each.data)
        return self._tensors[size // states[0].row_bytes]
