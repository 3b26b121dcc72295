"""One sequence of the KV cache: its blocks, and the entries in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.dropped_entries import DroppedEntries
from engine.prefix_tree import PrefixNode
from engine.recurrent.slots import StateSlot

BlockIds = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class KVSequence:
    """The cache of one sequence: its blocks and how many entries (tokens fed) they hold.

    Only the pool and the engine's forward write to it.
    """

    #: int32 [num_blocks]: block ids in order of position. Replaced as a whole, never written to: the device thread may
    #: be reading it.
    blocks: BlockIds
    #: Entries that the blocks have room for.
    capacity: int
    #: Entries in the cache.
    length: int = 0
    #: Leading blocks that others may read: entries are never written into them.
    num_shared_blocks: int = 0
    #: The last of the leading blocks that others find by their text, or the root; None: it shares with none.
    node: PrefixNode | None = None
    #: Length from which on it has a full block that others do not find yet.
    publishable_from: int = sys.maxsize
    #: The blocks are given back; rows still fed to this sequence go to block 0.
    released: bool = False
    #: What :meth:`~engine.kv_pool.KVPool.drop_blocks` has dropped.
    dropped: DroppedEntries = field(default_factory=DroppedEntries)
    #: So many of its first entries others have, too, but where it has read no more nobody has kept recurrent states of
    #: them: they are worth keeping.
    fork: int = 0
    #: Where its recurrent states lie; None: the model has none.
    states: StateSlot | None = None

    @property
    def num_dropped(self) -> int:
        """Entries that were dropped: the position of the next row is this and ``length``."""
        return self.dropped.count
