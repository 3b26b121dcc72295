"""Recurrent layers split by heads: what the ranks compute adds up to what the whole layer computes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.parallel.ranks import Place, Ranks
from engine.parallel.split_mixers import split_mixer
from tests.engine.conftest import build


def ranks_of(rank: int, size: int) -> Ranks:
    return cast("Ranks", SimpleNamespace(place=Place(rank, size, rank, size)))


def mixer_of(name: str, **changes: Any) -> Any:
    model = build(name, **changes)
    return next(each for each in model.modules() if hasattr(each, "conv1d"))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "granite4", "falcon_h1", "nemotron_h"])
def test_parts_add_up(name: str) -> None:
    whole = mixer_of(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 9, 32, generator=generator)
    total = torch.zeros_like(x)
    with torch.inference_mode():
        for rank in range(2):
            part = copy.deepcopy(whole)
            assert split_mixer(part, ranks_of(rank, 2)) is part.out_proj
            assert part.A_log.shape[0] == whole.A_log.shape[0] // 2
            total += part(x)
        assert torch.allclose(total, whole(x), atol=1e-5)


def test_layers_whose_heads_cannot_be_shared_out_stay_whole() -> None:
    assert split_mixer(mixer_of("granite4"), ranks_of(0, 3)) is None
    assert split_mixer(mixer_of("qwen3_5", linear_num_key_heads=1), ranks_of(0, 2)) is None
    assert split_mixer(mixer_of("jamba"), ranks_of(0, 2)) is None
