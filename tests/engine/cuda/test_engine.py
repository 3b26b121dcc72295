"""Whole models with attention in Triton, against transformers' own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from engine.compaction import Kept
from engine.cuda import attention
from engine.engine import Engine, Segment

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
) -> None:
    """A window, soft-capped scores, sinks, values of another size than keys: chunks, rounds of two rows, a tree's path.

    In Triton's interpreter the check at load would take longer than these passes.
    """
    engine = load_engine(name, device=DEVICE, enforce_eager=True, kv_cache_memory_bytes=200_000)
    if DEVICE == "cpu":
        engine.use(engine.torch_runner("triton attention", attention))
    assert engine.runner.name == "triton attention"
    stock = load_stock(name)
    texts = [tools.random_ids(15, seed=1), tools.random_ids(9, seed=2)]
    sequences = [engine.pool.open(len(ids) + 4) for ids in texts]
    rows: list[list[torch.Tensor]] = [[], []]
    for counts in ((10, 5), (2, 2), (3, 2)):
        segments = [
            Segment(sequence, ids[sequence.length : sequence.length + count], count)
            for sequence, ids, count in zip(sequences, texts, counts, strict=True)
        ]
        for part, logits in zip(rows, engine.forward(segments).split(list(counts)), strict=True):
            part.append(logits.cpu())
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    for part, ids in zip(rows, texts, strict=True):
        close(torch.cat(part), tools.stock_logits(stock, ids))
    one, two = sequences
    tree, other = engine.forward([Segment(one, [3, 4, 5], 3, parents=(-1, -1, 1)), Segment(two, [6], 1)]).split((3, 1))
    engine.keep_rows([Kept(one, len(texts[0]), (1, 2))])
    path = torch.cat([tree[1:], engine.forward([Segment(one, [7], 1)])]).cpu()
    close(path, tools.stock_logits(stock, [*texts[0], 4, 5, 7])[-3:])
    close(tree[:1].cpu(), tools.stock_logits(stock, [*texts[0], 3])[-1:])
    close(other.cpu(), tools.stock_logits(stock, [*texts[1], 6])[-1:])
