"""Random operations on the KV pool, beside a list of what each sequence must hold; planted bugs are found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine import kv_pool
from engine.kv_blocks import KVBlocks
from engine.kv_pool import CacheFull, KVPool
from engine.kv_sequence import BlockIds, KVSequence
from engine.prefix_tree import PrefixNode
from tests.engine.kv_entries import BLOCK, Shadow
from tests.engine.paged import num_free_blocks

#: Sequences that share what they have in common.
ACTIONS = (
    "open",
    "begin",
    "begin",
    "feed",
    "feed",
    "feed",
    "publish",
    "match",
    "rollback",
    "release",
    "vacate",
    "drop",
)
#: Texts: few tokens, so that many begin alike.
TOKENS = range(3)


def run_random_operations(pool: KVPool, seed: int) -> None:  # noqa: PLR0912
    rng = random.Random(seed)
    shadow = Shadow(pool, np.zeros((pool.total_blocks + 1, BLOCK), dtype=np.int64))
    expected = shadow.expected
    for _ in range(200):
        live = list(expected)
        sequence = rng.choice(live) if live else None
        action = rng.choice(ACTIONS)
        try:
            if action == "open":
                sequence = pool.open(rng.randint(1, 20))
                expected[sequence] = []
            elif action == "begin" or sequence is None:
                sequence = pool.open_empty((rng.choice("xy"),))
                expected[sequence] = []
                take_over(pool, shadow, sequence, rng)
            elif action == "feed":
                tokens = [rng.choice(TOKENS) for _ in range(rng.randint(0, 9))]
                if pool.grow(sequence, sequence.length + len(tokens)):
                    shadow.feed(sequence, tokens)
            elif action == "publish":
                pool.publish(sequence, expected[sequence])
            elif action == "match":
                take_over(pool, shadow, sequence, rng)
            elif action == "rollback":
                length = rng.randint(0, sequence.length)
                pool.rollback(sequence, length)
                assert sequence.length in (length, length // BLOCK * BLOCK)
                del expected[sequence][sequence.length :]
            elif action == "drop":
                first, end = sorted(rng.randint(0, sequence.length // BLOCK) for _ in range(2))
                pool.drop_blocks(sequence, first, end - first)
                del expected[sequence][first * BLOCK : end * BLOCK]
            elif action == "vacate":
                pool.vacate(sequence)
                expected[sequence].clear()
            else:
                tokens = expected.pop(sequence)
                pool.release(sequence, tokens if rng.random() < 0.7 else ())
                pool.release(sequence)
        except CacheFull:
            assert pool.used_blocks > 0
        shadow.check()
    for sequence in list(expected):
        pool.release(sequence)
        del expected[sequence]
        shadow.check()
    assert pool.available_blocks == pool.total_blocks, "blocks leaked"
    whole = pool.open(pool.total_blocks * BLOCK)
    assert sorted(whole.blocks) == list(range(1, pool.total_blocks + 1))
    assert pool.cached_blocks == 0
    pool.release(whole)
    assert num_free_blocks(pool) == pool.total_blocks


def take_over(pool: KVPool, shadow: Shadow, sequence: KVSequence, rng: random.Random) -> None:
    """Match a text that begins like what the sequence holds."""
    held = shadow.expected[sequence]
    text = [*held, *(rng.choice(TOKENS) for _ in range(12))]
    end = rng.randint(len(held), len(text))
    found = pool.match(sequence, text, end)
    assert sequence.length == len(held) + found <= max(end, len(held))
    shadow.expected[sequence] = text[: sequence.length]


SEEDS = range(60)


@pytest.mark.parametrize("total_blocks", [6, 24])
def test_random_operations_never_mix_sequences_nor_exceed_the_budget(total_blocks: int) -> None:
    for seed in SEEDS:
        run_random_operations(KVPool(total_blocks, BLOCK), seed)


class WritesIntoSharedBlocks(KVPool):
    def rollback(self, sequence: KVSequence, length: int) -> None:
        sequence.length = length


class ReleasesTwice(KVPool):
    def release(self, sequence: KVSequence, token_ids: Sequence[int] = ()) -> None:
        sequence.released = False
        super().release(sequence, token_ids)


class FreesSharedBlocks(KVBlocks):
    def drop(self, blocks: BlockIds) -> None:
        self._refs[blocks] = 1
        super().drop(blocks)


class MatchesWithoutACopy(KVPool):
    def _copy_beginning(self, sequence: KVSequence, node: PrefixNode, token_ids: Sequence[int]) -> int:
        count = super()._copy_beginning(sequence, node, token_ids)
        if count:
            self._copies.pop()
        return count


class SharesWithoutAReference(KVBlocks):
    def add(self, blocks: BlockIds) -> None:
        super().add(blocks[self._refs[blocks] == 0])


class ForgetsThePosition(KVPool):
    def _find(self, node: PrefixNode, token_ids: Sequence[int], end: int) -> list[PrefixNode]:
        found = super()._find(node, token_ids, end)
        start = node.depth * BLOCK
        return found or super()._find(node, token_ids[start + BLOCK :], end - start - BLOCK)


class PublishesBeforeTheBlockIsFull(KVPool):
    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        length = sequence.length
        sequence.length = min(sequence.capacity, -(-length // BLOCK) * BLOCK)
        super().publish(sequence, [*token_ids, *[0] * (sequence.length - len(token_ids))])
        sequence.length = length


class PublishesForOthers(KVPool):
    def open_empty(self, scope: Any = None) -> KVSequence:
        return super().open_empty(None if scope is None else ("x",))

    def publish(self, sequence: KVSequence, token_ids: Sequence[int]) -> None:
        super().publish(sequence, [2 - token for token in token_ids])


class KeepsTheNodeOfAReusedBlock(KVBlocks):
    def take(self, count: int) -> BlockIds:
        while self._num_free < count:
            block, _ = self._cached.popitem(last=False)
            self._push(np.array([block], dtype=np.int32))
        return super().take(count)


@pytest.mark.parametrize(
    "twin",
    [
        WritesIntoSharedBlocks,
        ReleasesTwice,
        FreesSharedBlocks,
        MatchesWithoutACopy,
        SharesWithoutAReference,
        ForgetsThePosition,
        PublishesBeforeTheBlockIsFull,
        PublishesForOthers,
        KeepsTheNodeOfAReusedBlock,
    ],
)
def test_the_random_operations_find_a_planted_bug(
    twin: type[KVPool | KVBlocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    if issubclass(twin, KVBlocks):
        monkeypatch.setattr(kv_pool, "KVBlocks", twin)

    def survives(seed: int) -> bool:
        try:
            run_random_operations((twin if issubclass(twin, KVPool) else KVPool)(24, BLOCK), seed)
        except (AssertionError, ValueError, IndexError, KeyError, StopIteration):
            return False
        return True

    assert not all(survives(seed) for seed in SEEDS)
