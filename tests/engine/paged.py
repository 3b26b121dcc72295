"""Ragged batches over a paged cache, with trees of rows or without, and attention written out row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import PagedBatch
from engine.batch import Segment, build_batch
from engine.kv_pool import KVPool
from engine.plan import BatchPlan

#: Entries in the cache, then rows fed: a number of them for a chain, or each row's parent (-1: the last entry).
Shape = tuple[int, int | Sequence[int]]

#: Batches without trees.
CHAINS: list[list[Shape]] = [
    [(0, 1)],
    [(9, 1)],
    [(0, 13)],
    [(6, 5)],
    [(3, 1), (9, 1), (30, 1), (2, 1)],
    [(7, 5), (4, 4), (5, 7), (0, 20), (0, 2), (0, 3)],
]


def random_tree(num_rows: int, seed: int) -> list[int]:
    """Parents: row 0 follows the cache, every other row one of those before it."""
    generator = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(row, (), generator=generator)) for row in range(1, num_rows))]


def num_free_blocks(pool: KVPool) -> int:
    """Blocks that hold nothing."""
    return pool.total_blocks - pool.used_blocks - pool.cached_blocks


@dataclass
class Case:
    """A batch whose rows' keys and values, and those before them, are random; all else in the caches is NaN."""

    shapes: Sequence[Shape]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 12
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 4

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        counts = [before + rows if isinstance(rows, int) else before + len(rows) for before, rows in self.shapes]
        pool = KVPool(sum(-(-count // self.block_size) for count in counts) + 3, self.block_size)
        pool.open(self.block_size)  # so that a table does not start with block 1
        segments = []
        for (before, rows), count in zip(self.shapes, counts, strict=True):
            sequence = pool.open(count)
            sequence.length = before
            segments.append(Segment(sequence, [0] * (count - before), 0, parents=() if isinstance(rows, int) else rows))
        device = torch.device(self.device)
        batch = build_batch(segments, block_size=self.block_size, vocab_size=9, max_model_len=10**6).to(device)
        self.batch = PagedBatch(batch)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        blocks = (pool.total_blocks + 1, self.kv_heads, self.block_size)
        k_cache = torch.full((*blocks, self.head_dim), float("nan"), dtype=self.dtype)
        v_cache = torch.full((*blocks, self.value_dim), float("nan"), dtype=self.dtype)
        self.keys, self.values = [], []
        for segment, count in zip(segments, counts, strict=True):
            keys, values = normal(count, self.kv_heads, self.head_dim), normal(count, self.kv_heads, self.value_dim)
            for entry in range(segment.sequence.length):
                block, offset = int(segment.sequence.blocks[entry // self.block_size]), entry % self.block_size
                k_cache[block, :, offset], v_cache[block, :, offset] = keys[entry], values[entry]
            self.keys.append(keys)
            self.values.append(values)
        self.k_cache, self.v_cache = k_cache.to(device), v_cache.to(device)
        rows = [count - before for (before, _), count in zip(self.shapes, counts, strict=True)]
        #: Keys and values of the rows, not in the caches yet.
        self.new_keys = torch.cat([keys[len(keys) - n :] for keys, n in zip(self.keys, rows, strict=True)]).to(device)
        self.new_values = torch.cat([v[len(v) - n :] for v, n in zip(self.values, rows, strict=True)]).to(device)
        self.query = normal(sum(rows), self.heads, self.head_dim).to(device)
        self.sinks = normal(self.heads).to(device)

    @property
    def plan(self) -> BatchPlan:
        """The batch's plan."""
        return self.batch.batch.plan

    def expected(
        self, *, scale: float, window: int | None = None, softcap: float | None = None, has_sinks: bool = False
    ) -> torch.Tensor:
        """What every row must get, float64 [T, Hq, Dv] on the CPU."""
        group = self.heads // self.kv_heads
        sinks = self.sinks.cpu().double()
        queries = iter(self.query.cpu().double())
        out = []
        for (before, rows), k, v in zip(self.shapes, self.keys, self.values, strict=True):
            keys, values = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
            for path in _paths(rows):
                seen = [*range(before), *(before + row for row in path)]  # in the order of their positions
                seen = seen if window is None else seen[-window:]
                scores = torch.einsum("hd,nhd->hn", next(queries), keys[seen]) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores)  # [Hq, n]
                total = weights.sum(1) + (sinks.exp() if has_sinks else 0)
                out.append(torch.einsum("hn,nhd->hd", weights / total[:, None], values[seen]))
        return torch.stack(out)


def _paths(rows: int | Sequence[int]) -> list[list[int]]:
    """For each row the rows from the root to it."""
    if isinstance(rows, int):
        return [list(range(row + 1)) for row in range(rows)]
    paths: list[list[int]] = []
    for row, parent in enumerate(rows):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths
