"""The ranks that follow rank 0: they run what it runs, on their parts of the weights and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.batch import Batch
from engine.compaction import copy_blocks, move_entries
from engine.parallel.messages import Operation, decode_copies, decode_moves, decode_pass, operation_of
from engine.parallel.ranks import Ranks


class SplitModel(Protocol):
    """What a rank needs of :class:`engine.engine.Engine`."""

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of the split model."""
        ...

    @property
    def all_caches(self) -> Sequence[torch.Tensor]:
        """Key and value caches, one after another."""
        ...

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy recurrent states on this rank."""
        ...

    def run(self, batch: Batch, rows: Sequence[int], layers: tuple[int, ...]) -> object:
        """Run a pass on this rank."""
        ...

    def warm_up_here(self) -> None:
        """Prepare passes on this rank."""
        ...

    def close(self) -> None:
        """Drop the weights and the cache, and leave the ranks."""
        ...


def follow(model: SplitModel) -> None:
    """Obey rank 0 until it stops; sessions, block tables and verification are its own.

    Raises:
        Unavailable: a rank is gone or silent.
    """
    assert model.ranks is not None, "there are no other ranks"
    try:
        while True:
            message = model.ranks.receive()
            match operation_of(message):
                case Operation.PASS:
                    with torch.inference_mode():
                        model.run(*decode_pass(message))
                case Operation.MOVE_ENTRIES:
                    with torch.inference_mode():
                        move_entries(model.all_caches, decode_moves(message))
                case Operation.COPY_BLOCKS:
                    copy_blocks(model.all_caches, decode_copies(message))
                case Operation.COPY_STATES:
                    model.copy_states(decode_copies(message))
                case Operation.WARM_UP:
                    model.warm_up_here()
                case Operation.STOP:
                    return
    finally:
        model.close()
