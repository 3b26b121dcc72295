"""Where a model runs: a device by its name, and the cores there are."""

from __future__ import annotations

import os

import torch

from specdec.errors import InvalidRequest


def usable_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_device(name: str) -> torch.device:
    """The device of a setting's name.

    Raises:
        InvalidRequest: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidRequest(f"device is {name!r}: use auto, cpu or cuda:N", param="device") from error
    if device.type == "cuda":
        index, count = device.index or 0, torch.cuda.device_count()
        if index >= count:
            raise InvalidRequest(f"device is {name!r} but this machine has {count} CUDA devices", param="device")
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise InvalidRequest(f"device is {name!r}: use auto, cpu or cuda:N", param="device")
    return device
