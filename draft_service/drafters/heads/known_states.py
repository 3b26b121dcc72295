"""The target's hidden states that the draft of a session knows: those that wait, and those in its cache.

The state of position t and the token at t + 1 make one entry of an EAGLE head's cache. As a rule the entries stand for
the positions 0, 1, 2, …; a session opened in the middle of a text starts later, and lost states leave a gap. Entries
before a gap stay in use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from specdec.types import HiddenStates


class KnownStates:
    """States of one session, in ascending order of position."""

    def __init__(self, positions: Sequence[int] = ()) -> None:
        """``positions`` have entries in the cache already."""
        self.num_entries = len(positions)
        self._waiting: deque[HiddenStates] = deque()
        #: Runs of positions without a gap: the first entry and its position.
        self._spans = [
            (i, position) for i, position in enumerate(positions) if i == 0 or position > positions[i - 1] + 1
        ]
        #: Positions that are not read.
        self._skipped = (0, 0)

    @property
    def end(self) -> int:
        """Position after the last one whose state is known; 0: none is."""
        if self._waiting:
            return self._waiting[-1].end
        return self._position(self.num_entries - 1) + 1 if self.num_entries else 0

    @property
    def num_before_gap(self) -> int:
        """Entries that stand for the first positions of the text."""
        if not self._spans or self._spans[0] != (0, 0):
            return 0
        return self._spans[1][0] if len(self._spans) > 1 else self.num_entries

    def num_waiting(self, num_tokens: int) -> int:
        """States that wait and can be ingested: of ``num_tokens`` committed tokens, those before the last."""
        return sum(max(0, min(states.end, num_tokens - 1) - states.start) for states in self._waiting)

    def add(self, states: Sequence[HiddenStates]) -> None:
        """Keep what is new and read; the states of one position are the same whenever they come."""
        for more in states:
            self._wait(more.rows(self.end, more.end))

    def skip(self, start: int, end: int) -> tuple[int, int]:
        """Positions from ``start`` to ``end`` are not read any more: forget those that wait, ignore those that come.

        Returns the entries that stand for them: the first one, and how many.
        """
        self._skipped = start, end
        waiting, self._waiting = self._waiting, deque()
        for states in waiting:
            self._wait(states)
        first = self._num_before(start)
        return first, self._num_before(end) - first

    def drop(self, first: int, count: int) -> None:
        """The cache has dropped ``count`` entries from ``first`` on; later ones have moved there."""
        end = first + count
        spans = []
        for (start, position), (stop, _) in pairwise([*self._spans, (self.num_entries, 0)]):
            if start < first:
                spans.append((start, position))
            if (kept := max(start, end)) < stop:
                spans.append((kept - count, position + kept - start))
        self._spans = spans
        self.num_entries -= count

    def take(self, count: int) -> list[HiddenStates]:
        """The first ``count`` that wait: they become entries now."""
        taken = []
        while count:
            first = self._waiting.popleft()
            part = first.rows(first.start, first.start + count)
            if part.end < first.end:
                self._waiting.appendleft(first.rows(part.end, first.end))
            if not self._spans or self._position(self.num_entries) != part.start:
                self._spans.append((self.num_entries, part.start))
            self.num_entries += part.num_positions
            count -= part.num_positions
            taken.append(part)
        return taken

    def put_back(self, taken: Sequence[HiddenStates]) -> None:
        """Undo the last :meth:`take`, or the end of it."""
        self._waiting.extendleft(reversed(taken))
        self.keep(self.num_entries - sum(states.num_positions for states in taken))

    def cut(self, num_tokens: int, num_read: int = 1) -> None:
        """Only the first ``num_tokens`` committed tokens stay: drop what depends on others; an entry does on the
        ``num_read`` tokens after its position.

        The state of the last one stays known while it waits; as an entry it depended on the token after it.
        """
        waiting, self._waiting = self._waiting, deque()
        self._waiting.extend(
            kept for states in waiting if (kept := states.rows(states.start, num_tokens)).num_positions
        )
        last = num_tokens - 1 - num_read  # the last position whose entry stays
        count = self.num_entries
        for entry, position in reversed(self._spans):
            if position <= last:
                count = min(count, entry + last - position + 1)
                break
            count = entry
        self.keep(count)

    def keep(self, count: int) -> None:
        """The cache has kept the first ``count`` entries alone."""
        self.num_entries = count
        self._spans = [span for span in self._spans if span[0] < count]

    def positions(self, first: int, count: int) -> list[int]:
        """Positions of the entries from ``first`` on."""
        return [self._position(entry) for entry in range(first, first + count)]

    def _wait(self, states: HiddenStates) -> None:
        """Keep what is read of some states."""
        start, end = self._skipped
        for part in (states.rows(0, start), states.rows(end, states.end)):
            if part.num_positions:
                self._waiting.append(part)

    def _num_before(self, position: int) -> int:
        """Entries that stand for earlier positions."""
        ends = pairwise([*self._spans, (self.num_entries, 0)])
        return sum(min(max(0, position - first), stop - start) for (start, first), (stop, _) in ends)

    def _position(self, entry: int) -> int:
        first, position = self._spans[bisect_right(self._spans, entry, key=lambda span: span[0]) - 1]
        return position + entry - first
