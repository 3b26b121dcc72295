"""The torch paged attention against attention written out, row by row."""

from __future__ import annotations

import pytest
import torch

from specdec.engine.attention import PagedBatch, paged_attention, write_kv
from specdec.engine.batch import Segment, build_batch
from specdec.engine.kv_pool import KVPool

BLOCK, HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 6, 2, 8, 12
DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One row [Hq, D] at the end of keys [n, Hkv, D] and values [n, Hkv, Dv]: [Hq, Dv]."""
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    out = []
    for head in range(HEADS):
        shared = head * KV_HEADS // HEADS
        scores = keys[:, shared] @ query[head] * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores)
        total = weights.sum() + (0 if sinks is None else torch.exp(sinks[head]))
        out.append((weights / total) @ values[:, shared])
    return torch.stack(out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    "shapes",  # (entries before, rows fed) of each sequence
    [
        [(0, 1)],
        [(9, 1)],
        [(0, 13)],
        [(6, 5)],
        [(3, 1), (9, 1), (30, 1), (2, 1)],
        [(7, 5), (4, 4), (5, 7), (0, 20), (0, 2), (0, 3)],
    ],
)
def test_paged_attention_equals_attention_by_hand(
    device: str, window: int | None, softcap: float | None, has_sinks: bool, shapes: list[tuple[int, int]]
) -> None:
    generator = torch.Generator().manual_seed(4)
    pool = KVPool(60, BLOCK)
    # What nobody has written may be NaN: a mask alone would let it through.
    k_cache = torch.full((61, KV_HEADS, BLOCK, DIM), float("nan"), device=device)
    v_cache = torch.full((61, KV_HEADS, BLOCK, VALUE_DIM), float("nan"), device=device)
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    sequences = [pool.open(40) for _ in shapes]
    queries: list[torch.Tensor] = []
    entries: list[tuple[torch.Tensor, torch.Tensor]] = []
    for count in (0, 1):  # what was there before, then the rows in question
        segments = []
        keys, values = [], []
        for index, shape in enumerate(shapes):
            if not shape[count]:
                continue
            segments.append(Segment(sequences[index], [0] * shape[count], 0))
            keys.append(torch.randn(shape[count], KV_HEADS, DIM, generator=generator))
            values.append(torch.randn(shape[count], KV_HEADS, VALUE_DIM, generator=generator))
        if count == 0:
            entries = [(torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, VALUE_DIM)) for _ in shapes]
        if segments:
            batch = PagedBatch(
                build_batch(segments, block_size=BLOCK, vocab_size=9, max_model_len=99, device=torch.device(device))
            )
            write_kv(k_cache, v_cache, torch.cat(keys).to(device), torch.cat(values).to(device), batch)
        for segment in segments:
            index = sequences.index(segment.sequence)
            old_keys, old_values = entries[index]
            entries[index] = torch.cat((old_keys, keys.pop(0))), torch.cat((old_values, values.pop(0)))
            segment.sequence.length += len(segment.token_ids)
    queries = [torch.randn(rows, HEADS, DIM, generator=generator) for _, rows in shapes]
    out = paged_attention(
        torch.cat(queries).to(device),
        k_cache,
        v_cache,
        batch,
        scale=0.4,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.to(device),
    )
    expected = [
        by_hand(
            query[row],
            keys[: before + row + 1],
            values[: before + row + 1],
            scale=0.4,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        for (before, rows), query, (keys, values) in zip(shapes, queries, entries, strict=True)
        for row in range(rows)
    ]
    torch.testing.assert_close(out.cpu(), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_groups_bound_the_padding() -> None:
    pool = KVPool(2000, BLOCK)
    segments = []
    for length, rows in [(3, 1), (900, 1), (1000, 1), (2, 1), (50, 5), (0, 400), (40, 7)]:
        sequence = pool.open(1100)
        sequence.length = length
        segments.append(Segment(sequence, [0] * rows, 0))
    batch = PagedBatch(
        build_batch(segments, block_size=BLOCK, vocab_size=9, max_model_len=2000, device=torch.device("cpu"))
    )
    used = sum(-(-length // BLOCK) for length in batch.batch.kv_lens)
    padded = sum(group.tables.numel() for group in batch.groups)
    assert padded <= 2 * used
    assert sum(len(group.kv_lens) for group in batch.groups) == len(segments)
