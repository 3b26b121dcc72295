"""The KV cache of one session of a draft model.

Every step follows one rule: **keep the entries that agree with the tokens, feed the tokens that have no entry.**
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.common_prefix import common_prefix_len
from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence


class SessionCache:
    """The session's sequence, and the tokens that its entries after the committed ones stand for."""

    def __init__(self, pool: KVPool, sequence: KVSequence) -> None:
        self._pool = pool
        self.sequence = sequence
        #: Drafted ones. The last may have no entry: the last drafted token is never fed.
        self.token_ids: tuple[int, ...] = ()

    def commit(self, num_committed: int, token_ids: Sequence[int]) -> None:
        """``token_ids`` follow the ``num_committed`` tokens known: keep the entries that agree."""
        same = common_prefix_len(self.token_ids, token_ids)
        if same == len(token_ids):
            self.token_ids = self.token_ids[same:]
        else:
            self.cut(num_committed + same)

    def cut(self, length: int) -> None:
        """Drop everything but the first ``length`` entries."""
        self.token_ids = ()
        if self.sequence.length > length:
            self._pool.rollback(self.sequence, length)
