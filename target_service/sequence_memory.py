"""Who has the blocks of the KV cache: sessions get them as they grow, and give them up where others need them more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

from engine.kv_pool import CacheFull, KVPool
from engine.kv_sequence import KVSequence
from engine.prefix_tree import Scope
from specdec.scheduling.admission import ClientFull

#: Blocks that stay free for each session that has some, when another one gets its first: those may grow. In a
#: simulation of 64 clients with the step times of a target of 12 M parameters on two cores, a pool for 12 full sessions
#: has 0.79 of an unbounded one's throughput with 0, 0.86 with a tenth of the pool, 0.88 with 0.5 and 0.89 with 0.6;
#: where a step's fixed cost dominates, with prompts of 500 tokens, 0.39, 0.37, 0.39 and 0.39.
RESERVED_BLOCKS: Final = 0.5
#: Times that a session may lose its blocks before it comes back with room to double its length, which it keeps.
MAX_PREEMPTIONS: Final = 3
#: Nanoseconds after which a session that is asked for nothing yields to those that wait: its client is slow. A draft
#: takes some milliseconds.
MAX_IDLE_NS: Final = 1_000_000_000


class Occupant(Protocol):
    """A session, as its memory sees it."""

    @property
    def in_flight(self) -> bool:
        """Whether a step carries it: its blocks cannot be taken."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether it has something to feed."""
        ...

    @property
    def idle_ns(self) -> int:
        """Nanoseconds since anything was asked of it; 0 while it has something to do."""
        ...

    @property
    def reusable(self) -> tuple[Sequence[int], int]:
        """Its tokens, and how many of them may have the entries of others."""
        ...

    def matched(self, num_tokens: int) -> None:
        """Entries of others stand for more of its tokens."""
        ...

    def preempt(self) -> None:
        """Its blocks were taken: everything is to be fed again."""
        ...


@dataclass(slots=True, eq=False)
class _Holding:
    """What one session holds."""

    sequence: KVSequence
    client: str
    #: Blocks that its client may hold.
    client_limit: int
    #: Entries that it may ever need.
    max_entries: int
    #: Blocks that were taken from the pool for it.
    num_taken: int = 0
    #: None until the session is made.
    occupant: Occupant | None = None
    #: It lost its blocks and waits for others.
    is_waiting: bool = False
    num_preemptions: int = 0
    #: As long as the sequence has no more entries, its blocks are not taken any more.
    safe_entries: int = 0

    @property
    def has_work(self) -> bool:
        return self.occupant is None or self.occupant.has_work

    @property
    def idle_ns(self) -> int:
        return 0 if self.occupant is None else self.occupant.idle_ns

    @property
    def is_safe(self) -> bool:
        """Whether its blocks are not taken at this length."""
        return self.sequence.capacity <= self.safe_entries

    @property
    def can_be_preempted(self) -> bool:
        is_held = self.is_waiting or self.is_safe or (self.occupant is not None and self.occupant.in_flight)
        return not is_held and len(self.sequence.blocks) > 0


class SequenceMemory:
    """The blocks of all sessions.

    A session is admitted with blocks for its prompt, and gets one after another while it decodes. If there are none
    left, the youngest session of the client with the most blocks is *preempted*: it gives up all its blocks, keeps its
    committed tokens, and is fed them again when there is room. Sessions come back in order of arrival, before new ones
    are admitted. One that lost its blocks :data:`MAX_PREEMPTIONS` times comes back with room to double its length, and
    keeps it until then. So it loses its blocks as many times more as its length may double, at most, and every session
    ends: one alone fits.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        #: In order of arrival.
        self._holdings: dict[KVSequence, _Holding] = {}
        #: Blocks that were taken from the pool for the sessions of each client.
        self._taken: Counter[str] = Counter()
        #: Called when no session waits any more: others may be admitted.
        self.on_all_back: Callable[[], None] = lambda: None
        #: Times that sessions lost their blocks, and how many wait for others.
        self.num_preemptions = 0
        self._num_waiting = 0

    def admit(
        self,
        token_ids: Sequence[int],
        num_reusable: int,
        max_entries: int,
        *,
        scope: Scope | None = None,
        client: str = "",
        client_limit: int | None = None,
    ) -> KVSequence:
        """A sequence with blocks for a prompt; of its first ``num_reusable`` tokens those that others of the scope have
        computed are in it.

        Raises:
            ClientFull: the client holds as much as it may.
            CacheFull: there is no room at this moment.
        """
        pool = self._pool
        limit = pool.total_blocks if client_limit is None else client_limit
        sequence = pool.open_empty(scope)
        holding = _Holding(sequence, client, limit, max_entries)
        try:
            if self._is_limited(holding, token_ids, num_reusable, len(token_ids)):
                raise ClientFull(f"the client holds as many as it may of the {limit} KV blocks")
            if self._has_precedence() or not self._fill(holding, token_ids, num_reusable, len(token_ids)):
                raise CacheFull(f"{pool.used_blocks} of {pool.total_blocks} KV blocks are in use")
        except BaseException:
            self._take(holding, -holding.num_taken)
            pool.release(sequence)
            raise
        self._holdings[sequence] = holding
        return sequence

    def belongs_to(self, sequence: KVSequence, occupant: Occupant) -> None:
        """The session of an admitted sequence is made."""
        self._holdings[sequence].occupant = occupant

    def release(self, sequence: KVSequence, token_ids: Sequence[int] = ()) -> None:
        """Give an admitted sequence back. Idempotent. Entry i stands for ``token_ids[i]``: without, none are reused."""
        if (holding := self._holdings.pop(sequence, None)) is not None:
            self._take(holding, -holding.num_taken)
            self._num_waiting -= holding.is_waiting
        self._pool.release(sequence, token_ids)

    def grow(self, sequence: KVSequence, num_entries: int) -> bool:
        """Make room for ``num_entries`` entries of a session that is in no step, if need be at the cost of others.

        False where it has to wait: all others are in the step that is being made, or it was preempted itself.
        """
        if num_entries <= sequence.capacity:
            return True
        holding, pool = self._holdings[sequence], self._pool
        if num_entries > holding.safe_entries:
            holding.safe_entries = 0
        while not holding.is_waiting:
            num_new = pool.blocks_for(num_entries) - len(sequence.blocks)
            is_over_limit = self._is_over_limit(holding, num_new)
            if not is_over_limit and pool.grow(sequence, num_entries):
                self._take(holding, num_new)
                return True
            if not self._preempt(holding.client if is_over_limit else None):
                break
        return False

    def match(self, sequence: KVSequence) -> Hashable | None:
        """Take over what others have computed since of the tokens that a session is to be fed next.

        Returns what tells the block that it computes next from all others; None: it is of no use to others.
        """
        holding = self._holdings.get(sequence)
        if holding is None or holding.is_waiting or holding.occupant is None:
            return None
        token_ids, num_reusable = holding.occupant.reusable
        if not num_reusable:
            return None
        if num_tokens := self._pool.match(sequence, token_ids, num_reusable):
            holding.occupant.matched(num_tokens)
        return self._pool.next_block(sequence, token_ids)

    def come_back(self) -> None:
        """Give blocks to preempted sessions with something to do, in order of arrival, as long as there is room."""
        if not self._num_waiting:
            return
        waiting = [each for each in self._holdings.values() if each.is_waiting and each.has_work]
        for holding in waiting:
            assert holding.occupant is not None, "a session that was not fed yet has nothing to come back to"
            token_ids, num_reusable = holding.occupant.reusable
            num_entries = len(token_ids)
            if holding.num_preemptions >= MAX_PREEMPTIONS:
                num_entries = min(2 * num_entries, holding.max_entries)
            if self._is_limited(holding, token_ids, num_reusable, num_entries):
                continue  # it waits for sessions of its own client
            if not self._fill(holding, token_ids, num_reusable, num_entries):
                return
            holding.is_waiting = False
            self._num_waiting -= 1
            if holding.num_preemptions >= MAX_PREEMPTIONS:
                holding.safe_entries = holding.sequence.capacity
        if waiting:
            self.on_all_back()

    def is_waiting(self, sequence: KVSequence) -> bool:
        """Whether the session lost its blocks and waits for others."""
        return self._holdings[sequence].is_waiting

    def _fill(self, holding: _Holding, token_ids: Sequence[int], num_reusable: int, num_entries: int) -> bool:
        """Give a sequence without blocks what others have computed of its tokens, and room; False: there is none."""
        pool, sequence = self._pool, holding.sequence
        while True:
            num_shared, num_unused = pool.blocks_to_match(sequence, token_ids, num_reusable)
            in_use = pool.used_blocks + num_unused + pool.blocks_for(num_entries) - num_shared
            may_fill = not pool.used_blocks or holding.num_preemptions >= MAX_PREEMPTIONS
            num_growing = len(self._holdings) - self._num_waiting
            if in_use <= pool.total_blocks - (0 if may_fill else ceil(RESERVED_BLOCKS * num_growing)):
                break
            if not self._preempt_idle():
                return False
        matched = pool.match(sequence, token_ids, num_reusable)
        if not pool.grow(sequence, num_entries):
            # A model with recurrent states goes on where they were kept, or shares nothing.
            pool.vacate(sequence)
            return False
        self._take(holding, len(sequence.blocks) - matched // pool.block_size)
        if matched and holding.occupant is not None:
            holding.occupant.matched(matched)
        return True

    def _preempt(self, client: str | None) -> bool:
        """Take the blocks of the youngest session of the client that holds most, or of ``client``; False: of none."""
        able = [each for each in self._holdings.values() if each.can_be_preempted and client in (None, each.client)]
        if not able:
            return False
        most = max(self._taken[each.client] for each in able)
        self._take_from(next(each for each in reversed(able) if self._taken[each.client] == most))
        return True

    def _preempt_idle(self) -> bool:
        """Take the blocks of the session that was asked for nothing for the longest time; False: of none."""
        able = [each for each in self._holdings.values() if each.can_be_preempted and each.idle_ns > MAX_IDLE_NS]
        if able:
            self._take_from(max(able, key=lambda each: each.idle_ns))
        return bool(able)

    def _take_from(self, victim: _Holding) -> None:
        self.num_preemptions += 1
        victim.num_preemptions += 1
        victim.is_waiting = True
        self._num_waiting += 1
        self._take(victim, -victim.num_taken)
        self._pool.vacate(victim.sequence)
        if victim.occupant is not None:
            victim.occupant.preempt()

    def _has_precedence(self) -> bool:
        """Whether a session waits for its blocks before new ones are admitted; one that waits for sessions of its own
        client does not count.
        """
        return self._num_waiting > 0 and any(
            each.is_waiting
            and each.has_work
            and not (each.occupant and self._is_over_limit(each, self._pool.blocks_for(len(each.occupant.reusable[0]))))
            for each in self._holdings.values()
        )

    def _is_limited(self, holding: _Holding, token_ids: Sequence[int], num_reusable: int, num_entries: int) -> bool:
        """Whether what a sequence without blocks would take from the pool is too much for the client."""
        if holding.client_limit >= self._pool.total_blocks:
            return False
        num_shared, _ = self._pool.blocks_to_match(holding.sequence, token_ids, num_reusable)
        return self._is_over_limit(holding, self._pool.blocks_for(num_entries) - num_shared)

    def _take(self, holding: _Holding, count: int) -> None:
        """Blocks were taken from the pool for a session, or given back."""
        holding.num_taken += count
        self._taken[holding.client] += count
        if not self._taken[holding.client]:
            del self._taken[holding.client]

    def _is_over_limit(self, holding: _Holding, num_new: int) -> bool:
        """Whether ``num_new`` blocks more are too many for the client. What was found in the cache does not count."""
        limit = holding.client_limit
        return limit < self._pool.total_blocks and self._taken[holding.client] + num_new > limit
