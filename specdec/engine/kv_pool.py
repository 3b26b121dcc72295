"""Which blocks of the KV cache belong to which sequence: pure bookkeeping, without a device.

Called from the event loop only. A sequence gets all the blocks it may ever need when it is opened, so a forward pass
never allocates and never fails half-way for want of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specdec.errors import Overloaded


class CacheFull(Overloaded):
    """The KV cache has too few free blocks at this moment; the text carries the numbers."""


@dataclass(slots=True, eq=False)
class KVSequence:
    """The cache of one sequence: its blocks and how many entries (tokens fed) they hold.

    Only :class:`KVPool` and the engine's forward write to it.
    """

    #: int32 [num_blocks]: block ids in order of position.
    blocks: npt.NDArray[np.int32]
    #: Tokens the blocks may hold by the reservation.
    max_tokens: int
    #: Entries in the cache.
    length: int = 0
    #: Leading blocks that a fork may share.
    num_shared_blocks: int = 0
    released: bool = field(default=False)


class KVPool:
    """A fixed number of blocks of ``block_size`` tokens, handed out to sequences.

    Block 0 is never handed out: it pads block tables and takes the rows of a sequence released under a queued batch.
    """

    def __init__(self, total_blocks: int, block_size: int) -> None:
        raise NotImplementedError

    def open(self, max_tokens: int) -> KVSequence:
        """Reserve blocks for ``max_tokens`` entries, evicting the least recently parked sessions if needed.

        Raises:
            InvalidRequest: it can never fit.
            CacheFull: it does not fit now.
        """
        raise NotImplementedError

    def can_open(self, max_tokens: int) -> bool:
        """Whether :meth:`open` would succeed now (evicting parked sessions counts as success)."""
        raise NotImplementedError

    def fork(self, sequence: KVSequence, length: int, max_tokens: int) -> KVSequence:
        """A sequence that starts with the first ``length`` entries of another; raises like :meth:`open`.

        Full blocks are shared; a partial one is copied by the engine before the next forward pass.
        """
        raise NotImplementedError

    def rollback(self, sequence: KVSequence, length: int) -> None:
        """Drop the entries after the first ``length``. O(1), except into blocks shared with a fork (copied then)."""
        raise NotImplementedError

    def release(self, sequence: KVSequence) -> None:
        """Give the blocks back. Idempotent."""
        raise NotImplementedError

    def park(self, sequence: KVSequence, key: str, token_ids: Sequence[int], now: float | None = None) -> None:
        """Release the sequence but keep its entries, evictable, under ``key``.

        ``token_ids`` are the tokens of the entries (more are ignored). An older one of the same key is dropped.
        ``now`` is in seconds of ``time.monotonic()``.
        """
        raise NotImplementedError

    def resume(self, key: str, token_ids: Sequence[int], max_tokens: int) -> KVSequence | None:
        """Take back a parked session, cut to the longest common prefix with ``token_ids``.

        The result's ``length`` (tokens reused) is at most ``len(token_ids) - 1``: at least one token must be fed.
        None where nothing is parked under the key or nothing is in common. Raises like :meth:`open`; the session then
        stays parked.
        """
        raise NotImplementedError

    def expire(self, now: float, ttl_s: float) -> int:
        """Drop what was parked more than ``ttl_s`` seconds before ``now``; returns how many sessions."""
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """Blocks free right now, parked ones not counted."""
        raise NotImplementedError

    @property
    def used_blocks(self) -> int:
        """Blocks of open sequences."""
        raise NotImplementedError

    @property
    def parked_blocks(self) -> int:
        """Blocks of parked sessions."""
        raise NotImplementedError

    @property
    def num_parked(self) -> int:
        """Parked sessions."""
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        """Open sequences."""
        raise NotImplementedError
