"""Cache branches: entries for assumed tokens, beside a session's own sequence.

A branch shares the entries of the session's own sequence and owns a few blocks. An assumption that continues all of a
branch is written at its end, where there is room; any other gets a new branch. When tokens are
committed, the branch that agrees with most of them becomes the session's own sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.common_prefix import common_prefix_len
from draft_service.drafters.session_cache import CacheBranch, SessionCache
from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence


class CacheBranches(SessionCache):
    """The session's own sequence and its branches."""

    def __init__(self, pool: KVPool, sequence: KVSequence) -> None:
        super().__init__(pool, sequence)
        self.branches: list[CacheBranch] = []

    def commit(self, num_committed: int, token_ids: Sequence[int]) -> None:
        """``token_ids`` follow the ``num_committed`` tokens known: keep the branches that agree, drop the others."""
        main, count = self.main, len(token_ids)
        best = max((main, *self.branches), key=lambda branch: branch.num_usable(num_committed, token_ids))
        kept = [branch for branch in self.branches if common_prefix_len(branch.token_ids, token_ids) == count]
        for branch in self.branches:
            if branch is not best and branch not in kept:
                self._pool.release(branch.sequence)
        if best is not main:
            self._pool.adopt(main.sequence, best.sequence)
            main.token_ids = best.token_ids
        self.branches = [branch for branch in kept if branch is not best]
        for branch in self.branches:
            branch.token_ids = branch.token_ids[count:]
        super().commit(num_committed, token_ids)

    def drop_branches(self) -> None:
        """Free the branches, except those a batch writes to."""
        for branch in self.branches:
            if not branch.is_busy:
                self._pool.release(branch.sequence)
        self.branches = [branch for branch in self.branches if branch.is_busy]

    def branch_for(self, num_committed: int, assumed: Sequence[int], num_tokens: int) -> CacheBranch | None:
        """A branch to feed with the assumed tokens and draft ``num_tokens`` after them, marked busy.

        Its entries agree with the assumed tokens, and at least the last of these has none. None: there is no memory.
        """
        length = num_committed + len(assumed) - 1
        end = length + num_tokens  # the last drafted token is never fed

        def value(branch: CacheBranch) -> tuple[int, bool]:
            num_usable = min(branch.num_usable(num_committed, assumed), length)
            return num_usable, _may_extend(branch, assumed, length)

        best = max((self.main, *self.branches), key=value)
        num_usable, may_extend = value(best)
        if not may_extend or not self._pool.grow(best.sequence, end):
            sequence = self._pool.branch(best.sequence, num_usable, end)
            if sequence is None:
                return None
            best = CacheBranch(sequence)
            self.branches.append(best)
        best.is_busy = True
        return best

    def undo(self, branch: CacheBranch, length: int) -> None:
        """A batch failed: drop the branch; the session's own sequence has its former length again."""
        if branch is self.main:
            super().undo(branch, length)
        else:
            self.branches.remove(branch)
            self._pool.release(branch.sequence)


def _may_extend(branch: CacheBranch, assumed: Sequence[int], length: int) -> bool:
    """Whether an assumption of ``length`` entries may be written at the end of a branch, which keeps all of its own."""
    sequence = branch.sequence
    return (
        not branch.is_busy
        and sequence.length <= length
        and common_prefix_len(branch.token_ids, assumed) == len(branch.token_ids)
    )
