"""How much cache a GPU gets that is shared; torch's accounts of it are made up here."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.layers import PAGED, record_layers
from engine.loading import memory
from engine.loading.memory import LargestStep
from specdec.errors import InvalidRequest
from specdec.settings import ModelSettings
from target_service.verification.verifier import decide_many
from tests.engine.conftest import build

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


@pytest.mark.parametrize("max_num_batched_tokens", [40, 300])
def test_the_largest_step_is_run_to_its_tokens(max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 128 tokens takes the rows as several texts. Only the accounts of memory are made up."""
    seen: list[Any] = []
    forward = Engine.forward

    def watched(engine: Engine, segments: Any) -> torch.Tensor:
        seen.append([len(segment.token_ids) for segment in segments])
        return forward(engine, segments)

    def decide(logits: torch.Tensor) -> None:
        seen.append(tuple(logits.shape))
        decide_many(logits)

    for name, value in (("memory_allocated", 500), ("max_memory_allocated", 1200)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: seen.append(value) or value)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    model = build("llama")
    shapes, vocab_size = record_layers(model, 2, torch.device("cpu"))
    model.set_attn_implementation(PAGED)
    monkeypatch.setattr(Engine, "forward", watched)
    largest = LargestStep(max_num_batched_tokens, decide)
    found = memory.measure_activation(
        model, shapes, largest, block_size=4, vocab_size=vocab_size, max_model_len=128, device=torch.device("cpu")
    )
    assert found == 700
    rows = [40] if max_num_batched_tokens == 40 else [128, 128, 44]
    assert seen == [500, rows, (max_num_batched_tokens, vocab_size), 1200]
