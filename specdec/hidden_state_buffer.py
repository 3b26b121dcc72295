"""Hidden states in transit from a target to a draft: kept until they can be passed on, in pieces for messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from specdec.types import HiddenStates

#: Bytes kept of one session at most. With 4096 features in bfloat16 that is 8192 positions, with three layers of that
#: width 2730.
MAX_BYTES: Final = 64 * 2**20
#: Bytes of hidden states in one message at most (of one position, where that is more): a message of this size keeps an
#: event loop for about 5 ms.
PIECE_BYTES: Final = 2**20


class StateBuffer:
    """Hidden states in ascending order of position. Beyond ``max_bytes`` the oldest positions are dropped."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._blocks: deque[HiddenStates] = deque()
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def add(self, states: HiddenStates) -> None:
        """Keep more; of positions that are kept already, and of later ones, the new ones count."""
        while self._blocks and self._blocks[-1].end > states.start:
            self._put_back(self._blocks.pop(), 0, states.start)
        self._append(states)
        while self.num_bytes > self._max_bytes:
            oldest = self._blocks.popleft()
            self.num_bytes -= len(oldest.data)
            if not self._blocks:  # as much of it as there is room for
                self._append(oldest.rows(oldest.end - self._max_bytes // oldest.row_bytes, oldest.end))

    @property
    def end(self) -> int:
        """Position after the last one that is kept; 0: none is."""
        return self._blocks[-1].end if self._blocks else 0

    def take(self, end: int | None = None) -> tuple[HiddenStates, ...]:
        """All that is kept of positions below ``end`` (None: of all), in pieces, and keep none of it."""
        if not self._blocks:
            return ()
        if len(self._blocks) == 1 and end is None and self.num_bytes <= PIECE_BYTES:  # as a rule
            self.num_bytes = 0
            return (self._blocks.popleft(),)
        taken: list[HiddenStates] = []
        while self._blocks and (end is None or self._blocks[0].start < end):
            block = self._blocks.popleft()
            self.num_bytes -= len(block.data)
            if end is not None and block.end > end:
                self._blocks.appendleft(block.rows(end, block.end))
                self.num_bytes += len(self._blocks[0].data)
                block = block.rows(0, end)
            taken.append(block)
        return tuple(pieces(taken))

    def clear(self) -> None:
        """Drop all."""
        self._blocks.clear()
        self.num_bytes = 0

    def _append(self, states: HiddenStates) -> None:
        if states.num_positions:
            self._blocks.append(states)
            self.num_bytes += len(states.data)

    def _put_back(self, states: HiddenStates, start: int, end: int) -> None:
        self.num_bytes -= len(states.data)
        self._append(states.rows(start, end))


def pieces(blocks: Iterable[HiddenStates], max_bytes: int = PIECE_BYTES) -> Iterator[HiddenStates]:
    """The same rows in as few blocks as can be, of at most ``max_bytes`` each, but no less than a row."""
    run: list[HiddenStates] = []
    for block in blocks:
        if run and not _continues(run[-1], block):
            yield from _cut(run, max_bytes)
            run = []
        run.append(block)
    if run:
        yield from _cut(run, max_bytes)


def _continues(before: HiddenStates, after: HiddenStates) -> bool:
    return before.end == after.start and _kind(before) == _kind(after)


def _kind(states: HiddenStates) -> tuple[int, str, int]:
    return states.num_features, states.dtype, states.group_size


def _cut(run: list[HiddenStates], max_bytes: int) -> Iterator[HiddenStates]:
    """Blocks that continue each other, as pieces."""
    first = run[0]
    whole = first if len(run) == 1 else _joined(run)
    size = max(1, max_bytes // first.row_bytes)
    for start in range(whole.start, whole.end, size):
        yield whole.rows(start, start + size)


def _joined(run: list[HiddenStates]) -> HiddenStates:
    return replace(run[0], data=b"".join(block.data for block in run))
