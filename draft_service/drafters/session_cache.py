"""The KV cache of one session of a draft model.

Every step follows one rule: **keep the entries that agree with the tokens, feed the tokens that have no entry.**
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from draft_service.common_prefix import common_prefix_len
from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence


@dataclass(slots=True, eq=False)
class CacheBranch:
    """A cached sequence and the tokens that its entries after the committed ones stand for."""

    sequence: KVSequence
    #: The last ones may have no entry (the last drafted token is never fed).
    token_ids: tuple[int, ...] = ()
    #: A running batch writes to it.
    is_busy: bool = False

    def num_usable(self, num_committed: int, token_ids: Sequence[int]) -> int:
        """Entries that agree with the first ``num_committed`` tokens and ``token_ids`` after them."""
        return min(self.sequence.length, num_committed + common_prefix_len(self.token_ids, token_ids))


class SessionCache:
    """The session's own sequence."""

    def __init__(self, pool: KVPool, sequence: KVSequence) -> None:
        self._pool = pool
        self.main = CacheBranch(sequence)

    def commit(self, num_committed: int, token_ids: Sequence[int]) -> None:
        """``token_ids`` follow the ``num_committed`` tokens known: keep the entries that agree."""
        main, count = self.main, len(token_ids)
        if common_prefix_len(main.token_ids, token_ids) == count:
            main.token_ids = main.token_ids[count:]
        else:
            self.cut(main.num_usable(num_committed, token_ids))

    def cut(self, length: int) -> None:
        """Drop everything but the first ``length`` entries of the session's own sequence."""
        self.drop_branches()
        self.main.token_ids = ()
        if self.main.sequence.length > length:
            self._pool.rollback(self.main.sequence, length)

    def drop_branches(self) -> None:
        """Free the branches; there are none."""

    def branch_for(self, num_committed: int, assumed: Sequence[int], num_tokens: int) -> CacheBranch | None:
        """A branch to feed with the assumed tokens and draft ``num_tokens`` after them; None: it cannot be done."""
        return None

    def undo(self, branch: CacheBranch, length: int) -> None:
        """A batch failed: the branch has its former length again."""
        branch.is_busy = False
        self._pool.rollback(branch.sequence, min(length, branch.sequence.length))


#: Makes what is kept of a session's cache, given its sequence.
SessionCacheFactory: TypeAlias = Callable[[KVPool, KVSequence], SessionCache]
