"""Sequences of small blocks, and what their entries must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence
from tests.engine.paged import num_free_blocks

BLOCK = 4


def grow(sequence: KVSequence, count: int) -> KVSequence:
    sequence.length += count
    return sequence


@dataclass
class Shadow:
    """A pool, a cache of token ids in place of keys and values, and what every sequence must read from it."""

    pool: KVPool
    cache: np.ndarray[Any, np.dtype[np.int64]]
    expected: dict[KVSequence, list[int]] = field(default_factory=dict)

    def copy(self) -> None:
        for source, target in self.pool.take_copies():
            self.cache[target] = self.cache[source]

    def feed(self, sequence: KVSequence, tokens: list[int]) -> None:
        self.copy()
        for token in tokens:
            self.cache[sequence.blocks[sequence.length // BLOCK], sequence.length % BLOCK] = token
            sequence.length += 1
            self.expected[sequence].append(token)

    def check(self) -> None:
        self.copy()
        pool = self.pool
        for sequence, tokens in self.expected.items():
            assert sequence.length == len(tokens)
            assert 0 not in sequence.blocks
            assert len(sequence.blocks) * BLOCK == sequence.capacity >= sequence.length
            read = self.cache[sequence.blocks].reshape(-1)[: sequence.length]
            assert read.tolist() == tokens, "a sequence reads another one's entries"
        held = {int(block) for sequence in self.expected for block in sequence.blocks}
        assert len(held) == pool.used_blocks <= pool.total_blocks, "used blocks miscounted"
        assert num_free_blocks(pool) >= 0
        assert pool.num_open == len(self.expected)
