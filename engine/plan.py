"""What one ragged forward pass reads and writes: which rows belong to which sequence and where their cache lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One ragged batch of T rows (tokens fed) over S sequences; rows of a sequence are neighbours, in order.

    The KV cache of a layer is two tensors [num_blocks, num_kv_heads, block_size, head_dim], one for keys and one for
    values. Entry ``e`` of sequence ``s`` lies in block ``block_tables[s, e // block_size]``, at ``e % block_size``.
    A row with entry ``e`` attends to entries 0…e of its own sequence (less where a sliding window says so); its
    own key and value are written before anything is read.

    The rows of a sequence may form a tree of drafted tokens (``ancestors``). Their entries then lie behind the cached
    ones in the order of the rows, row ``i`` of ``n`` at entry ``kv_len - n + i``, while ``positions`` holds depths:
    siblings share a position.

    All tensors are contiguous and on the device of the cache.
    """

    #: int64 [T]: position of each row in its sequence, entries that were dropped included.
    positions: torch.Tensor
    #: int64 [T]: where each row's key and value go: block * block_size + offset.
    slots: torch.Tensor
    #: int32 [S + 1]: first row of each sequence, then T.
    row_starts: torch.Tensor
    #: int32 [S, B]: blocks of each sequence, padded with 0.
    block_tables: torch.Tensor
    #: int32 [S]: entries of each sequence once this batch is written.
    kv_lens: torch.Tensor
    #: Largest entry of kv_lens.
    max_kv_len: int
    #: Most rows of one sequence.
    max_rows: int
    block_size: int
    #: int64 [T], or None where the rows of every sequence form a chain. Bit ``j`` of a row says whether it sees row
    #: ``j`` of its own sequence's rows, itself included; ancestors stand before their descendants. Cached entries are
    #: seen by all rows, and rows from the 65th on by all that follow them, so -1 is a chain of any length (and only a
    #: chain has -1). A row of 0 bits sees the cached entries alone; its position may be that of one of them.
    ancestors: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return self.positions.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.kv_lens.shape[0]
