"""The device a model runs on, by the name of a setting."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

from specdec.errors import InvalidRequest


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a setting's name; of several ranks on one machine each takes the GPU of its number.

    Raises:
        InvalidRequest: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device is {name!r}: use auto, cpu or cuda:N", param="device") from error
    if device.type == "cuda":
        index, count = (device.index or 0) + local_rank, torch.cuda.device_count()
        if index >= count:
            raise InvalidRequest(
                f"device is {name!r} and needs GPU {index}, but this machine has {count} CUDA devices", param="device"
            )
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise InvalidRequest(f"device is {name!r}: use auto, cpu or cuda:N", param="device")
    return device


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU; None on a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@cache
def has_triton() -> bool:
    """Whether kernels for GPUs can be compiled: Triton comes with torch's CUDA builds for Linux."""
    return find_spec("triton") is not None
