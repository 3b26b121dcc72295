"""First layers of draft heads that the target runs: those of its settings, and those that were sent to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.state_map import StateMap
from specdec.errors import InvalidRequest, Overloaded


@dataclass(slots=True)
class _Sent:
    """One that was sent."""

    num_bytes: int
    client: str
    #: None while it comes.
    state_map: StateMap | None = None


class StateMaps:
    """By their fingerprints. Of those that were sent, the least recently used ones that no open session uses are given
    up when another one needs the memory.
    """

    def __init__(self, own: Mapping[str, StateMap], max_bytes: int) -> None:
        """``own``: those of the settings, which are kept; ``max_bytes``: of all that were sent."""
        self._own = dict(own)
        self._sent: dict[str, _Sent] = {}  # the least recently used first
        self._max_bytes = max_bytes

    @property
    def num_bytes(self) -> int:
        """Of all that were sent."""
        return self._bytes_of(self._sent)

    def find(self, fingerprint: str) -> StateMap | None:
        """The map, for a session; None: it is not here."""
        if (sent := self._sent.pop(fingerprint, None)) is None:
            return self._own.get(fingerprint)
        self._sent[fingerprint] = sent
        return sent.state_map

    def wants(self, fingerprint: str) -> bool:
        """Whether it is not here, and would be taken."""
        return bool(fingerprint and self._max_bytes) and fingerprint not in self._own | self._sent

    def reserve(
        self,
        fingerprint: str,
        num_bytes: int,
        *,
        client: str,
        max_share: float,
        in_use: Collection[str],
        free_bytes: int,
    ) -> None:
        """Hold the memory of a map that comes: call :meth:`store` or :meth:`give_up`. ``max_share``: of the memory for
        maps, what those of this client may take; ``in_use``: maps of open sessions; ``free_bytes``: of the machine.

        Raises:
            Overloaded: there is none.
            InvalidRequest: it is empty.
        """
        if not num_bytes:
            raise InvalidRequest("num_bytes is 0; give the bytes of the whole map", param="num_bytes")
        limit = int(max_share * self._max_bytes)
        kept = {name for name, sent in self._sent.items() if name in in_use or sent.state_map is None}
        of_client = {name for name, sent in self._sent.items() if sent.client == client}
        for names, most, why in (
            (kept, self._max_bytes, f"{self._max_bytes} are for them all (max_state_map_bytes)"),
            (kept & of_client, limit, f"its client may hold {limit} (max_client_kv_share of max_state_map_bytes)"),
        ):
            if num_bytes + self._bytes_of(names) > most:
                raise Overloaded(f"the first layer of a head has {num_bytes} bytes, and {why}; states are sent instead")
        if num_bytes > free_bytes:
            raise Overloaded(
                f"the first layer of a head needs {num_bytes} bytes, and {free_bytes} are free on this machine: lower"
                " its share of the KV cache; states are sent instead"
            )
        for name in [name for name in self._sent if name not in kept]:
            if num_bytes + self.num_bytes > self._max_bytes or (
                name in of_client and num_bytes + self._bytes_of(of_client) > limit
            ):
                del self._sent[name]
        self._sent[fingerprint] = _Sent(num_bytes, client)

    def store(self, fingerprint: str, state_map: StateMap) -> None:
        """It is here."""
        self._sent[fingerprint].state_map = state_map

    def give_up(self, fingerprint: str) -> None:
        """It does not come."""
        del self._sent[fingerprint]

    def _bytes_of(self, fingerprints: Collection[str]) -> int:
        return sum(sent.num_bytes for name, sent in self._sent.items() if name in fingerprints)
