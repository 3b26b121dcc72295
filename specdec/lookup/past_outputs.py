"""The outputs of past requests, each client's apart from the others'."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Final

from specdec.lookup.suffix_tree import SuffixCache

#: Tokens of past outputs that are kept at most: 265 MB of tree if nothing repeats.
MAX_CACHED_TOKENS: Final = 2_000_000
#: Suffixes put into the tree of past outputs at once: less than a millisecond.
_MAX_SUFFIXES_AT_ONCE: Final = 1024


class PastOutputs:
    """Those of one owner, with the seeds they were drawn with."""

    def __init__(self, depth: int, max_requests: int) -> None:
        self.cache = SuffixCache(depth, max_requests, MAX_CACHED_TOKENS)
        self._max_requests = max_requests
        #: Seeds of past outputs for as long as they may be kept, in order, and how many there are of each.
        self._seeds: deque[int | None] = deque()
        self._num_outputs_of: Counter[int | None] = Counter()
        self._is_updating = False

    def has_seed(self, seed: int | None) -> bool:
        """Whether an output was drawn with this seed."""
        return bool(self._num_outputs_of[seed])

    def add(self, output: Sequence[int], seed: int | None) -> None:
        """Add an output; it enters the tree in the next iterations of the event loop."""
        self.cache.add(output)
        self._seeds.append(seed)
        self._num_outputs_of[seed] += 1
        if len(self._seeds) > self._max_requests:
            oldest = self._seeds.popleft()
            self._num_outputs_of[oldest] -= 1
            if not self._num_outputs_of[oldest]:
                del self._num_outputs_of[oldest]
        if not self._is_updating:
            self._update()

    def _update(self) -> None:
        """Put outputs into the tree, and take the oldest out, some at a time."""
        self.cache.apply_pending(_MAX_SUFFIXES_AT_ONCE)
        self._is_updating = not self.cache.is_up_to_date
        if self._is_updating:
            asyncio.get_running_loop().call_soon(self._update)


class PastOutputsByOwner:
    """All of them. What one client wrote is no draft for another: how well it fits would tell what it says."""

    def __init__(self, depth: int, max_requests: int) -> None:
        self._depth = depth
        self._max_requests = max_requests
        #: Least recently added to first. Most services have one owner, without a name.
        self._past = OrderedDict({"": PastOutputs(depth, max_requests)})
        self._num_tokens: Counter[str] = Counter()

    def of(self, owner: str) -> PastOutputs:
        """Those of one owner."""
        if owner not in self._past:
            self._past[owner] = PastOutputs(self._depth, self._max_requests)
        return self._past[owner]

    def add(self, owner: str, output: Sequence[int], seed: int | None) -> None:
        """Add an output. All owners together keep as many tokens as one may: the others' go, the oldest first."""
        if not output or not self._max_requests:
            return
        self.of(owner).add(output, seed)
        self._past.move_to_end(owner)
        self._num_tokens[owner] = min(self._num_tokens[owner] + len(output), MAX_CACHED_TOKENS)
        while len(self._past) > 1 and self._num_tokens.total() > MAX_CACHED_TOKENS:
            oldest, _ = self._past.popitem(last=False)
            del self._num_tokens[oldest]
