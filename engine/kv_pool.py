"""The block tables of the KV cache: which blocks belong to which sequence. Uses no device.

Called from the event loop only. A sequence gets all the blocks it may ever need when it is opened. So a forward pass
never allocates and never runs out of memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.dropped_entries import DroppedEntries
from engine.kv_sequence import BlockIds, KVSequence
from engine.parked_text import ParkedText
from engine.recurrent.slots import StateSlot, StateSlots
from specdec.errors import InvalidRequest, Overloaded


class CacheFull(Overloaded):
    """The KV cache has too few free blocks at this moment; the text carries the numbers."""


@dataclass(frozen=True, slots=True)
class _Parked:
    """A session without a stream: its entries, the tokens they stand for, and when it was parked."""

    blocks: BlockIds
    text: ParkedText
    dropped: DroppedEntries
    parked_at_s: float
    owner: str
    states: StateSlot | None


class KVPool:
    """A fixed number of blocks of ``block_size`` tokens, handed out to sequences.

    Block 0 is never handed out: it pads block tables and takes the rows of a sequence released under a queued batch.
    Blocks 1…total_blocks are reused last-freed-first, so memory the system has not backed yet stays untouched.

    A block is *used* while an open sequence or a branch has it, *parked* while only parked sessions have it, else
    *free*.
    """

    def __init__(
        self, total_blocks: int, block_size: int, *, has_windows: bool = False, states: StateSlots | None = None
    ) -> None:
        """``has_windows``: attention sees a window of the entries, and finds its first by the position of a row.
        ``states``: places for the recurrent states of sequences, where the model has such.
        """
        self._has_windows = has_windows
        self.states = states
        self.total_blocks = total_blocks
        self.block_size = block_size
        self._free = np.arange(total_blocks, 0, -1, dtype=np.int32)  # a stack: the top is _free[_num_free - 1]
        self._num_free = total_blocks
        self._refs = np.zeros(total_blocks + 1, dtype=np.int32)  # by open sequences and parked sessions
        self._open_refs = np.zeros(total_blocks + 1, dtype=np.int32)  # by open sequences alone
        self._num_used = 0
        self._num_open = 0
        self._parked: OrderedDict[str, _Parked] = OrderedDict()  # least recently parked first
        self._copies: deque[tuple[int, int]] = deque()

    def open(self, max_tokens: int, owner: str = "") -> KVSequence:
        """Reserve blocks for ``max_tokens`` entries, evicting the least recently parked sessions if needed, first those
        of the owner itself.

        Raises:
            InvalidRequest: it can never fit.
            CacheFull: it does not fit now.
        """
        self._require_states()
        blocks = self._allocate(self.blocks_for(max_tokens), max_tokens, owner)
        self._num_open += 1
        return KVSequence(blocks, max_tokens, owner=owner, states=self._take_states(owner))

    def can_open(self, max_tokens: int) -> bool:
        """Whether :meth:`open` would succeed now (evicting parked sessions counts as success)."""
        has_place = self.states is None or self.states.num_free > 0 or len(self._parked) > 0
        return has_place and self.blocks_for(max_tokens) <= self.total_blocks - self._num_used

    def branch(self, sequence: KVSequence, length: int, max_tokens: int) -> KVSequence | None:
        """Open a copy of the first ``length`` entries for a guessed continuation, to be adopted or released soon.

        Full blocks are shared; the engine copies a partial one before the next forward pass. A branch takes free blocks
        only, as few as ``max_tokens`` needs, so it never evicts a parked session; returns None where they do not
        suffice. It has room to the end of its last block, and does not count as an open sequence. None, too, where the
        model has recurrent states, which are not shared.
        """
        if self.states is not None:
            return None
        num_own = self._own_blocks(sequence, length, max_tokens)
        if num_own > self._num_free:
            return None
        branch = self._share(sequence, length, self._allocate(num_own, max_tokens), max_tokens)
        branch.max_tokens = len(branch.blocks) * self.block_size
        branch.is_branch = True
        return branch

    def adopt(self, sequence: KVSequence, branch: KVSequence) -> None:
        """Replace the sequence's entries by the branch's: the guess was right. The sequence keeps its reservation.

        The branch counts as released. No entry is copied. Blocks are needed only where another branch still shares
        some of the sequence's later blocks; then it raises as :meth:`rollback` does.
        """
        self._check_open(sequence)
        self._check_open(branch)
        count = len(branch.blocks)
        if not branch.is_branch or count > len(sequence.blocks) or branch.length > sequence.max_tokens:
            raise ValueError(
                f"a sequence with room for {sequence.max_tokens} entries cannot take over {branch.length} entries in"
                f" {count} blocks"
            )
        if count < sequence.num_shared_blocks:
            self._unshare(sequence, count * self.block_size)
        replaced = sequence.blocks[:count]
        sequence.blocks = np.concatenate((branch.blocks, sequence.blocks[count:]))
        sequence.length = branch.length
        sequence.dropped = branch.dropped
        sequence.num_shared_blocks = branch.num_shared_blocks
        branch.released = True
        self._drop_open(replaced)
        self._drop(replaced)

    def rollback(self, sequence: KVSequence, length: int) -> None:
        """Drop the entries after the first ``length``. O(1), except into blocks shared with a branch.

        Shared blocks are replaced by the sequence's own (the one that is kept in part is copied), so a branch never
        reads what is written next. Recurrent states that cannot be had at that length are rolled back to 0: all is to
        be fed again.

        Raises:
            CacheFull: shared blocks would have to be replaced and none are free.
        """
        self._check_open(sequence)
        if not 0 <= length <= sequence.length:
            raise ValueError(f"cannot roll back to {length} of {sequence.length} entries")
        if sequence.states is not None and not sequence.states.reaches(length):
            length = 0
        if length // self.block_size < sequence.num_shared_blocks:
            self._unshare(sequence, length)
        sequence.length = length
        sequence.dropped = sequence.dropped.before(length)

    def drop_blocks(self, sequence: KVSequence, first: int, count: int) -> None:
        """Drop the entries of ``count`` whole blocks from block ``first`` on; the blocks take entries to come. Entries
        behind them become that much earlier ones, and rows to come keep their positions.
        """
        self._check_open(sequence)
        if self._has_windows:
            raise ValueError("the model's attention has a sliding window, which counts entries: none can be dropped")
        if self.states is not None:
            raise ValueError("the model has recurrent states, which hold every entry: none can be dropped")
        end, size, blocks = first + count, self.block_size, sequence.blocks
        if not 0 <= first <= end or end * size > sequence.length or (self._refs[blocks[first:end]] > 1).any():
            raise ValueError(
                f"cannot drop blocks {first} to {end} of {size} entries: there are {sequence.length} entries, and a"
                f" branch may share {sequence.num_shared_blocks} blocks"
            )
        sequence.blocks = np.concatenate((blocks[:first], blocks[end:], blocks[first:end]))
        sequence.length -= count * size
        sequence.dropped = sequence.dropped.and_from(first * size, count * size)
        if sequence.num_shared_blocks > first:
            sequence.num_shared_blocks = max(first, sequence.num_shared_blocks - count)

    def release(self, sequence: KVSequence) -> None:
        """Give the blocks back. Idempotent."""
        if sequence.released:
            return
        sequence.released = True
        self._num_open -= not sequence.is_branch
        if self.states is not None and sequence.states is not None:
            self.states.give_back(sequence.states)
        self._drop_open(sequence.blocks)
        self._drop(sequence.blocks)

    def park(
        self,
        sequence: KVSequence,
        key: str,
        token_ids: Sequence[int],
        now: float | None = None,
        text_positions: Sequence[int] | None = None,
    ) -> None:
        """Release the sequence but keep its entries, evictable, under ``key``.

        Entry i stands for the token at ``text_positions[i]`` (None: at i) of ``token_ids``. An older session of the
        same key is dropped. ``now`` is in seconds of ``time.monotonic()``.
        """
        if sequence.released:
            return
        num_positions = sequence.length if text_positions is None else len(text_positions)
        last = sequence.length - 1 if text_positions is None else max(text_positions, default=-1)
        if num_positions != sequence.length or last >= len(token_ids):
            raise ValueError(
                f"{sequence.length} entries at {num_positions} positions cannot be parked under {len(token_ids)} tokens"
            )
        self.drop_parked(key)
        if not sequence.length:
            self.release(sequence)
            return
        kept = sequence.blocks[: self.blocks_for(sequence.length)]
        self._refs[kept] += 1
        states = None if sequence.states is None else sequence.states.moved()
        self.release(sequence)
        parked_at_s = time.monotonic() if now is None else now
        text = ParkedText.of(token_ids[: last + 1], text_positions)
        self._parked[key] = _Parked(kept, text, sequence.dropped, parked_at_s, sequence.owner, states)

    def parked_text_positions(self, key: str) -> Sequence[int]:
        """Where the tokens of a parked session's entries stand in its text; empty where there is none."""
        parked = self._parked.get(key)
        return [] if parked is None else parked.text.positions.tolist()

    def resume(self, key: str, token_ids: Sequence[int], max_tokens: int, owner: str = "") -> KVSequence | None:
        """Take back a parked session, cut to the entries before the first that does not agree with ``token_ids``.

        At least the last token must be fed: its entry is not among them.
        None where nothing is parked under the key or nothing is in common (the parked session is dropped then); nor are
        recurrent states that cannot be had at that length.
        Raises like :meth:`open`; the session then stays parked.
        """
        parked = self._parked.get(key)
        if parked is None:
            return None
        length = parked.text.num_common(token_ids)
        if length == 0 or not (parked.states is None or parked.states.reaches(length)):
            self.drop_parked(key)
            return None
        num_blocks = self.blocks_for(max(max_tokens, length))
        kept = parked.blocks[: self.blocks_for(length)]
        # The last kept block is written next; where a branch shares it, this sequence needs its own copy.
        copy_last = length % self.block_size > 0 and int(self._refs[kept[-1]]) > 1
        num_new = num_blocks - len(kept) + copy_last
        needed = num_new + int(np.count_nonzero(self._open_refs[kept] == 0))
        self._require(needed, num_blocks, max_tokens)
        del self._parked[key]
        self._add_open(kept)
        self._drop(parked.blocks)
        new = self._allocate(num_new, max_tokens, owner)
        if copy_last:
            self._copies.append((int(kept[-1]), int(new[0])))
            last, kept = kept[-1:], kept[:-1]
            self._drop_open(last)
            self._drop(last)
        self._num_open += 1
        return KVSequence(
            np.concatenate((kept, new)),
            max_tokens,
            length,
            owner,
            num_shared_blocks=length // self.block_size,
            dropped=parked.dropped.before(length),
            states=parked.states,
        )

    def drop_parked(self, key: str) -> bool:
        """Free a parked session; False where there is none."""
        parked = self._parked.pop(key, None)
        if parked is None:
            return False
        self._drop(parked.blocks)
        if self.states is not None and parked.states is not None:
            self.states.give_back(parked.states)
        return True

    def expire(self, now: float, ttl_s: float) -> int:
        """Drop what was parked more than ``ttl_s`` seconds before ``now``; returns how many sessions."""
        old = [key for key, parked in self._parked.items() if now - parked.parked_at_s > ttl_s]
        for key in old:
            self.drop_parked(key)
        return len(old)

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks (from, to) to copy before anything is written. Called by the engine, on the device thread."""
        copies = []
        while self._copies:
            copies.append(self._copies.popleft())
        return copies

    @property
    def used_blocks(self) -> int:
        """Blocks of open sequences."""
        return self._num_used

    @property
    def parked_blocks(self) -> int:
        """Blocks that only parked sessions have."""
        return self.total_blocks - self._num_free - self._num_used

    @property
    def num_parked(self) -> int:
        """Parked sessions."""
        return len(self._parked)

    @property
    def num_open(self) -> int:
        """Open sequences."""
        return self._num_open

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` entries; ValueError below 1."""
        if num_tokens < 1:
            raise ValueError(f"a sequence needs room for at least 1 token, not {num_tokens}")
        return -(-num_tokens // self.block_size)

    @staticmethod
    def _check_open(sequence: KVSequence) -> None:
        if sequence.released:
            raise ValueError("the sequence was released")

    def _require(self, num_needed: int, num_blocks: int, max_tokens: int) -> None:
        """Raise unless ``num_needed`` more blocks may be used; ``num_blocks`` is the whole sequence's count."""
        if num_blocks > self.total_blocks:
            raise InvalidRequest(
                f"a sequence of {max_tokens} tokens needs {num_blocks} KV blocks of {self.block_size} tokens and the"
                f" cache has {self.total_blocks}: shorten it or raise kv_cache_memory_bytes",
                param="max_tokens",
            )
        if num_needed > self.total_blocks - self._num_used:
            raise CacheFull(
                f"{max_tokens} tokens need {num_needed} more KV blocks, {self._num_used} of {self.total_blocks} are in"
                f" use by {self._num_open} open sessions: retry when some have ended"
            )

    def _allocate(self, count: int, max_tokens: int, owner: str = "") -> BlockIds:
        """Take ``count`` blocks for an open sequence of ``max_tokens``, evicting parked sessions as needed."""
        self._require(count, self.blocks_for(max_tokens), max_tokens)
        while self._num_free < count:
            self._evict(owner)
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count][::-1].copy()
        self._add_open(blocks)
        return blocks

    def _evict(self, owner: str) -> None:
        """Drop the session that was parked first, of the owner if it has any."""
        own = (key for key, parked in self._parked.items() if parked.owner == owner)
        self.drop_parked(next(own, next(iter(self._parked))))

    def _require_states(self) -> None:
        """Raise unless another sequence's recurrent states have a place."""
        if self.states is not None and not self.states.num_free and not self._parked:
            raise CacheFull(
                f"the {self.states.count} places for recurrent states are in use by {self._num_open} open sessions:"
                " retry when some have ended, or raise kv_cache_memory_bytes"
            )

    def _take_states(self, owner: str) -> StateSlot | None:
        if self.states is None:
            return None
        if not self.states.num_free:
            self._evict(owner)
        return self.states.take()

    def _own_blocks(self, sequence: KVSequence, length: int, max_tokens: int) -> int:
        """Blocks that a branch of the first ``length`` entries needs for itself."""
        self._check_open(sequence)
        if not 0 <= length <= min(sequence.length, max_tokens):
            raise ValueError(f"cannot branch off {length} of {sequence.length} entries into room for {max_tokens}")
        return self.blocks_for(max_tokens) - length // self.block_size

    def _share(self, sequence: KVSequence, length: int, own: BlockIds, max_tokens: int) -> KVSequence:
        """The first ``length`` entries of a sequence, continued in blocks ``own``."""
        num_full, partial = divmod(length, self.block_size)
        shared = sequence.blocks[:num_full]
        self._add_open(shared)
        if partial:
            self._copies.append((int(sequence.blocks[num_full]), int(own[0])))
        sequence.num_shared_blocks = max(sequence.num_shared_blocks, num_full)
        return KVSequence(
            np.concatenate((shared, own)),
            max_tokens,
            length,
            sequence.owner,
            num_shared_blocks=num_full,
            dropped=sequence.dropped.before(length),
        )

    def _add_open(self, blocks: BlockIds) -> None:
        self._num_used += int(np.count_nonzero(self._open_refs[blocks] == 0))
        self._refs[blocks] += 1
        self._open_refs[blocks] += 1

    def _drop_open(self, blocks: BlockIds) -> None:
        self._open_refs[blocks] -= 1
        self._num_used -= int(np.count_nonzero(self._open_refs[blocks] == 0))

    def _drop(self, blocks: BlockIds) -> None:
        """Give up one reference to each block; those without any are free again, the first on top of the stack."""
        self._refs[blocks] -= 1
        freed = blocks[self._refs[blocks] == 0][::-1]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def _unshare(self, sequence: KVSequence, length: int) -> None:
        """Replace the shared blocks from ``length`` on by the sequence's own."""
        first = length // self.block_size
        tail = sequence.blocks[first : sequence.num_shared_blocks]
        shared = np.nonzero(self._refs[tail] > 1)[0]
        if len(shared):
            old = tail[shared]
            new = self._allocate(len(shared), sequence.max_tokens, sequence.owner)
            if shared[0] == 0 and length % self.block_size:
                self._copies.append((int(old[0]), int(new[0])))
            blocks = sequence.blocks.copy()  # the device thread may be reading the old array
            blocks[first + shared] = new
            sequence.blocks = blocks
            self._drop_open(old)
            self._drop(old)
        sequence.num_shared_blocks = first
