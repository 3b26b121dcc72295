"""Whole models with attention in Triton, against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from engine.engine import Engine, Segment
from engine.loading import acceleration

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "mistral", "gpt_oss", "deepseek")),
    ],
)
def test_ragged_passes_equal_the_stock_model(
    name: str,
    load_engine: Callable[..., Engine],
    load_stock: Callable[[str], PreTrainedModel],
    tools: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window, soft-capped scores, sinks, values of another size than keys: in chunks, then as rounds of two rows."""
    monkeypatch.setattr(acceleration, "native_attention", acceleration.triton_attention)  # on a CPU
    engine = load_engine(name, device=DEVICE, enforce_eager=True, kv_cache_memory_bytes=200_000)
    assert engine.runner.name in {"native attention", "triton attention"}
    stock = load_stock(name)
    texts = [tools.random_ids(15, seed=1), tools.random_ids(9, seed=2)]
    sequences = [engine.pool.open(len(ids)) for ids in texts]
    rows: list[list[torch.Tensor]] = [[], []]
    for counts in ((10, 5), (2, 2), (3, 2)):
        segments = [
            Segment(sequence, ids[sequence.length : sequence.length + count], count)
            for sequence, ids, count in zip(sequences, texts, counts, strict=True)
        ]
        for part, logits in zip(rows, engine.forward(segments).split(list(counts)), strict=True):
            part.append(logits.cpu())
    for part, ids in zip(rows, texts, strict=True):
        torch.testing.assert_close(torch.cat(part), tools.stock_logits(stock, ids), atol=1e-4, rtol=1e-4)
