"""The ranks that follow rank 0: they run what it runs, on their parts of the weights and the cache."""

from __future__ import annotations

import torch

from specdec.engine.compaction import copy_blocks, move_entries
from specdec.engine.engine import Engine
from specdec.engine.parallel.messages import Operation, decode_pass, numbers_of, operation_of


def follow(engine: Engine) -> None:
    """Obey rank 0 until it stops; sessions, block tables and verification are its own.

    Raises:
        Unavailable: a rank is gone or silent.
    """
    ranks = engine.followers
    assert ranks is not None, "there are no other ranks"
    try:
        while True:
            message = ranks.receive()
            match operation_of(message):
                case Operation.PASS:
                    batch, rows, layers = decode_pass(message)
                    with torch.inference_mode():
                        engine.run(batch, rows, layers)
                case Operation.MOVE_ENTRIES:
                    numbers = iter(numbers_of(message))
                    with torch.inference_mode():
                        move_entries(engine.all_caches, list(zip(numbers, numbers, numbers, numbers, strict=True)))
                case Operation.COPY_BLOCKS:
                    numbers = iter(numbers_of(message))
                    copy_blocks(engine.all_caches, list(zip(numbers, numbers, strict=True)))
                case Operation.STOP:
                    return
    finally:
        ranks.close()
        engine.followers = None
        engine.close()
