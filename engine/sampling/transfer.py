"""Copies between the host and a device that the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values, dtype=dtype, device=device)``; a tensor keeps its dtype, and its place on a device.

    A copy to a GPU uses pinned memory: a copy from other memory waits until the GPU has finished all its work.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return host if host.device.type == device.type else host.pin_memory().to(device, non_blocking=True)


class Fetched:
    """A tensor on its way to the host, while the device goes on."""

    __slots__ = ("_arrived", "_host")

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy; on a CPU there is none."""
        self._host = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> Tensor:
        """The tensor on the host; waits for the copy alone, not for what the device was given after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._host
