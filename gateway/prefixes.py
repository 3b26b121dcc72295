"""Which parked session a prompt continues, for requests that name none. Hashes of prefixes are all that is kept."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

#: Tokens from one prefix to the next that is known.
BLOCK_SIZE: Final = 32
#: Prefixes at most, about 200 bytes each; those of the session that was used least recently go first.
MAX_PREFIXES: Final = 65_536


@dataclass(slots=True)
class _ParkedTokens:
    """What one session has parked."""

    num_tokens: int = 0
    #: Hashes of its prefixes, the shortest first.
    prefixes: list[bytes] = field(default_factory=list)


class Prefixes:
    """The sessions that passed through this gateway, by what they begin with."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._num_prefixes = 0
        #: The session used least recently is the first.
        self._sessions: OrderedDict[str, _ParkedTokens] = OrderedDict()
        self._session_of: dict[bytes, str] = {}

    def __len__(self) -> int:
        """Prefixes that are kept."""
        return self._num_prefixes

    def find(self, client: str, token_ids: Sequence[int], is_free: Callable[[str], bool]) -> str | None:
        """The session of this client with the longest prefix in common, among those that are free.

        Resuming a session drops what it holds behind the common prefix, so at least half of it must be in common.
        """
        hashes = _hashes(client, token_ids)
        for count in range(len(hashes), 0, -1):
            session_id = self._session_of.get(hashes[count - 1])
            if session_id is None or not is_free(session_id):
                continue
            if 2 * count * BLOCK_SIZE >= self._sessions[session_id].num_tokens:
                return session_id
        return None

    def note(self, client: str, session_id: str, token_ids: Sequence[int]) -> None:
        """The session has parked these tokens."""
        self._forget(session_id)
        hashes = _hashes(client, token_ids)
        self._sessions[session_id] = _ParkedTokens(len(token_ids), hashes)
        self._session_of.update(dict.fromkeys(hashes, session_id))
        self._num_prefixes += len(hashes)
        while self._num_prefixes > self._max_prefixes:
            self._forget(next(iter(self._sessions)))

    def _forget(self, session_id: str) -> None:
        parked = self._sessions.pop(session_id, None)
        if parked is None:
            return
        self._num_prefixes -= len(parked.prefixes)
        for prefix in parked.prefixes:
            if self._session_of.get(prefix) == session_id:  # else another session has it, too
                del self._session_of[prefix]


def _hashes(client: str, token_ids: Sequence[int]) -> list[bytes]:
    """A hash of each prefix of whole blocks, the shortest first. Clients have nothing in common."""
    running, hashes = blake2b(client.encode(), digest_size=16), []
    for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE):
        running.update(array("q", token_ids[end - BLOCK_SIZE : end]).tobytes())
        hashes.append(running.digest())
    return hashes
