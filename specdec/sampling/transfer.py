"""Numbers of the host on their way to a device, which the host does not wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """``torch.tensor(values, dtype=dtype, device=device)``; a tensor of the host keeps its dtype.

    To a GPU it goes by way of pinned memory: a copy out of any other waits until the GPU has done all it has to do.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
