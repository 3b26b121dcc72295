"""How much cache a GPU gets that is shared; torch's accounts of it are made up here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.loading import memory
from specdec.errors import InvalidRequest
from specdec.settings import ModelSettings

GB = 10**9
BLOCK_BYTES = 32 * 1000


def blocks(monkeypatch: pytest.MonkeyPatch, share: float, *, free: int, **bytes_of: int) -> int:
    """Blocks on a GPU of 80 GB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GB)
    shapes: Any = [SimpleNamespace(bytes_per_token=1000)]
    settings = ModelSettings(model="some", gpu_memory_utilization=share)
    found, _, max_model_len = memory.size_cache(
        settings, shapes, device=torch.device("cuda"), max_model_len=100, **bytes_of
    )
    assert max_model_len == 100
    return found


def test_a_share_holds_weights_activations_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(monkeypatch, 0.75, free=65 * GB, weight_bytes=14 * GB, activation_bytes=GB)
    assert found == (60 - 14 - 1) * GB // BLOCK_BYTES - 1


def test_a_draft_finds_room_beside_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(monkeypatch, 0.125, free=19 * GB, weight_bytes=GB, activation_bytes=GB)
    assert found == (10 - 1 - 1) * GB // BLOCK_BYTES - 1


def test_what_others_have_taken_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(monkeypatch, 0.9, free=9 * GB, weight_bytes=GB, activation_bytes=GB)
    assert found == (9 - 1) * GB // BLOCK_BYTES - 1, "0.9 of what is free or cached"
    with pytest.raises(InvalidRequest, match="may take 0 bytes"):
        blocks(monkeypatch, 0.9, free=0, weight_bytes=GB, activation_bytes=GB)
