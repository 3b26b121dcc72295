"""The lines of one session in the KV cache: what is committed, and guesses at how it goes on.

A line is a cached sequence and the tokens its entries stand for. The main line is the session's own and holds its whole
reservation; the others are branches that share its entries and own a few blocks. Every step follows one rule: **keep
the entries that agree with the tokens, feed the tokens that have no entry.** A guess that continues all of a line is
written at its end, where the room is reserved already; any other gets a branch. When tokens are committed, the line
that agrees longest becomes the main line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.prefixes import common_prefix_len
from specdec.engine.kv_pool import KVPool, KVSequence


@dataclass(slots=True, eq=False)
class CacheBranch:
    """A cached sequence and the tokens after the committed ones that it stands for."""

    sequence: KVSequence
    #: The last ones may have no entry (the last drafted token is never fed).
    token_ids: tuple[int, ...] = ()
    #: A running batch writes to it.
    is_busy: bool = False

    def usable(self, num_committed: int, token_ids: Sequence[int]) -> int:
        """Entries that agree with the first ``num_committed`` tokens and ``token_ids`` after them."""
        return min(self.sequence.length, num_committed + common_prefix_len(self.token_ids, token_ids))

    def ends_before(self, assumed: Sequence[int], length: int, end: int) -> bool:
        """Whether a guess of ``length`` entries and some to feed, ``end`` in all, may be written at its end.

        Nothing that is on it must be lost, and it must have the room.
        """
        sequence = self.sequence
        return (
            not self.is_busy
            and sequence.length <= length
            and end <= sequence.max_tokens
            and common_prefix_len(self.token_ids, assumed) == len(self.token_ids)
        )


class CacheBranches:
    """All lines of one session."""

    def __init__(self, pool: KVPool, sequence: KVSequence) -> None:
        self._pool = pool
        self.main = CacheBranch(sequence)
        self._branches: list[CacheBranch] = []

    @property
    def has_branches(self) -> bool:
        """Whether drafting ahead holds blocks of its own."""
        return bool(self._branches)

    def commit(self, num_committed: int, token_ids: Sequence[int]) -> None:
        """``token_ids`` follow the ``num_committed`` tokens known: keep the lines that agree, drop the others."""
        main, count = self.main, len(token_ids)
        best = max((main, *self._branches), key=lambda line: line.usable(num_committed, token_ids))
        kept = [line for line in self._branches if common_prefix_len(line.token_ids, token_ids) == count]
        for line in self._branches:
            if line is not best and line not in kept:
                self._pool.release(line.sequence)
        if best is not main:
            self._pool.adopt(main.sequence, best.sequence)
            main.token_ids = best.token_ids
        self._branches = [line for line in kept if line is not best]
        if common_prefix_len(main.token_ids, token_ids) == count:
            for line in (main, *self._branches):
                line.token_ids = line.token_ids[count:]
        else:
            self.cut(main.usable(num_committed, token_ids))

    def cut(self, length: int) -> None:
        """Drop everything but the first ``length`` entries of the main line."""
        self.drop_branches()
        self.main.token_ids = ()
        if self.main.sequence.length > length:
            self._pool.rollback(self.main.sequence, length)

    def drop_branches(self) -> None:
        """Give their blocks back, but for those a batch is writing to."""
        for line in self._branches:
            if not line.is_busy:
                self._pool.release(line.sequence)
        self._branches = [line for line in self._branches if line.is_busy]

    def follow(self, num_committed: int, assumed: Sequence[int], num_tokens: int) -> CacheBranch | None:
        """A line to feed with the assumed tokens and draft ``num_tokens`` after them, marked busy; None without room.

        Its entries agree with the assumed tokens and lack at least the last of them.
        """
        length = num_committed + len(assumed) - 1
        end = length + num_tokens  # the last drafted token is never fed
        if end > self.main.sequence.max_tokens:
            return None

        def worth(line: CacheBranch) -> tuple[int, bool]:
            return min(line.usable(num_committed, assumed), length), line.ends_before(assumed, length, end)

        best = max((self.main, *self._branches), key=worth)
        usable, has_room = worth(best)
        if not has_room:
            branch = self._pool.branch(best.sequence, usable, end)
            if branch is None:
                return None
            best = CacheBranch(branch)
            self._branches.append(best)
        best.is_busy = True
        return best

    def give_up(self, line: CacheBranch, length: int) -> None:
        """The batch failed: a branch goes, the main line gets its former length back."""
        line.is_busy = False
        if line is self.main:
            self._pool.rollback(line.sequence, min(length, line.sequence.length))
        else:
            self._branches.remove(line)
            self._pool.release(line.sequence)
