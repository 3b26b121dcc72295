"""Copies to a device that the host does not wait for."""

from __future__ import annotations

import torch

from engine.sampling.transfer import send

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "meta")


def test_what_lies_on_the_device_is_not_sent_again() -> None:
    """Only memory of the host can be pinned."""
    there = torch.empty(3, device=DEVICE)
    assert send(there, torch.device(DEVICE.type)) is there
