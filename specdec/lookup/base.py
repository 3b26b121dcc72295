"""The interface of lookups: they continue a text by what followed the same tokens elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from specdec.types import SessionSpec


@dataclass(frozen=True, slots=True)
class Match:
    """A continuation that was found."""

    token_ids: tuple[int, ...] = ()
    #: How many of the last tokens stood in one place before, at most, and were continued there.
    length: int = 0
    #: Whether the client predicted it.
    is_predicted: bool = False


class LookupText(Protocol):
    """What a lookup keeps of one session."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The committed tokens."""
        ...

    @property
    def num_pending(self) -> int:
        """Committed tokens that are not ingested yet."""
        ...

    def ingest(self, num_tokens: int) -> None:
        """Ingest the next ``num_tokens`` pending tokens."""
        ...

    def replace(self, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first ``keep`` tokens and put others after them; the new ones are pending."""
        ...


T = TypeVar("T", bound=LookupText)


class Lookup(ABC, Generic[T]):
    """A lookup method, and what its sessions share. A few microseconds per token; no context limit."""

    @classmethod
    def is_usable(cls) -> bool:
        """Whether this machine has what it needs."""
        return True

    @property
    @abstractmethod
    def long_match(self) -> int:
        """Tokens that must have matched for a continuation to be better than a model's."""

    @abstractmethod
    def open(self, spec: SessionSpec) -> T:
        """A text with everything pending."""

    @abstractmethod
    def look_up(self, text: T, num_tokens: int) -> Match:
        """The best continuation, ``num_tokens`` at most, of the ingested tokens.

        No token is pending. The text does not change.
        """

    def close(self, text: T) -> None:
        """The session is over."""


AnyLookup = Lookup[Any]
