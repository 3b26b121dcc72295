"""Log-probabilities of a position; the many of them are kept as bytes, not as objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final

#: One of the most likely tokens: its id, and its log-probability.
_ENTRY: Final = Struct("<If")
ENTRY_BYTES: Final = _ENTRY.size


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token that stands at a position and the most likely ones there, under the raw model distribution."""

    token_id: int
    #: Nats.
    logprob: float
    #: By probability; 1 is the most likely, 0 is unknown.
    rank: int
    #: The most likely tokens, best first: the id of each, uint32, and its log-probability, float32; little-endian. The
    #: message has the same bytes: as objects 20 of them took 20 times the memory, and most of the gateway's time.
    packed_top: bytes = b""

    @property
    def top(self) -> Iterator[tuple[int, float]]:
        """The most likely tokens and their log-probabilities; the first one has rank 1."""
        return _ENTRY.iter_unpack(self.packed_top)

    @property
    def all(self) -> Iterator[tuple[int, float, int]]:
        """The most likely tokens, then the one that stands there: id, log-probability and rank."""
        for rank, (token_id, logprob) in enumerate(self.top, 1):
            yield token_id, logprob, rank
        yield self.token_id, self.logprob, self.rank


def pack_top(entries: Iterable[tuple[int, float]]) -> bytes:
    """:attr:`PositionLogprobs.packed_top` of tokens and log-probabilities."""
    return b"".join([_ENTRY.pack(token_id, logprob) for token_id, logprob in entries])
