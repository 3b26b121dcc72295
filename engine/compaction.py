"""Entries that move within KV caches: those of a tree's accepted path, and whole blocks that sequences share.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_sequence import KVSequence
from engine.sampling.transfer import send


@dataclass(frozen=True, slots=True)
class Kept:
    """Of the entries from ``first`` on only some stay: entry ``first + rows[i]`` becomes entry ``first + i``."""

    sequence: KVSequence
    first: int
    #: Ascending.
    rows: Sequence[int]

    @property
    def moves(self) -> bool:
        """Whether any entry is to be moved: none is where the path is the first rows."""
        return bool(self.rows) and self.rows[-1] != len(self.rows) - 1


def moves_of(kept: Sequence[Kept], block_size: int) -> list[tuple[int, int, int, int]]:
    """Which entries are to be moved: from which block and offset to which."""
    moves = []
    for one in kept:
        blocks = one.sequence.blocks
        for to, row in enumerate(one.rows, one.first):
            if (source := one.first + row) != to:
                origin = int(blocks[source // block_size]), source % block_size
                moves.append((*origin, int(blocks[to // block_size]), to % block_size))
    return moves


def move_entries(caches: Sequence[torch.Tensor], moves: Sequence[tuple[int, int, int, int]]) -> None:
    """Move entries of caches [num_blocks, H, block_size, D], all at once; there is one at least."""
    places = send([*zip(*moves, strict=True)], caches[0].device)  # [4, moves]
    for cache in caches:
        cache[places[2], :, places[3]] = cache[places[0], :, places[1]]


def copy_blocks(caches: Sequence[torch.Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copy blocks of caches [num_blocks, …], as if one (source, target) after the other; there is one at least."""
    with torch.inference_mode():
        if len(copies) == 1 or not caches:  # a model without attention has none
            for cache in caches:
                cache[copies[0][1]] = cache[copies[0][0]]
            return
        origins: dict[int, int] = {}  # of what each block holds in the end: a copy may be copied again
        for source, target in copies:
            origins[target] = origins.get(source, source)
        sources, targets = send([list(origins.values()), list(origins)], caches[0].device).unbind()
        for cache in caches:
            cache.index_copy_(0, targets, cache.index_select(0, sources))
