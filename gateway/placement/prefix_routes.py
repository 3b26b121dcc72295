"""Which target has computed the beginning of a prompt. Hashes of prefixes are all that is kept."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

#: Tokens from one prefix to the next that is known.
BLOCK_SIZE: Final = 32
#: Prefixes at most, about 200 bytes each; those used least recently go first.
MAX_PREFIXES: Final = 65_536
#: Tokens hashed at once: a third of a millisecond. Other tasks run before the next ones.
MAX_TOKENS_AT_ONCE: Final = 16_384


async def hash_prefixes(scope: str, token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """A hash of each prefix of whole blocks, the shortest first. Two scopes have nothing in common."""
    running, hashes = blake2b(scope.encode(), digest_size=16), []
    for start in range(0, len(token_ids), MAX_TOKENS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        tokens = array("I", token_ids[start : start + MAX_TOKENS_AT_ONCE])
        data, size = tokens.tobytes(), BLOCK_SIZE * tokens.itemsize
        for at in range(0, len(data) - size + 1, size):
            running.update(data[at : at + size])
            hashes.append(running.digest())
    return tuple(hashes)


class PrefixRoutes:
    """The target that the latest prompt with a prefix was sent to."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        #: The prefix used least recently is the first.
        self._targets: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        """Prefixes that are kept."""
        return len(self._targets)

    def find(self, hashes: Sequence[bytes]) -> str | None:
        """The target that has most of a prompt; None: no target has any of it."""
        return next((self._targets[prefix] for prefix in reversed(hashes) if prefix in self._targets), None)

    def note(self, hashes: Sequence[bytes], target: str) -> None:
        """A prompt is sent to a target. Of its prefixes the longest are forgotten first."""
        for prefix in reversed(hashes):
            self._targets[prefix] = target
            self._targets.move_to_end(prefix)
        while len(self._targets) > self._max_prefixes:
            self._targets.popitem(last=False)
