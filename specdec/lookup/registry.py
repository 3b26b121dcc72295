"""Lookups by their methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specdec.lookup.base import AnyLookup
from specdec.lookup.ngram import NgramLookup
from specdec.lookup.suffix import SuffixLookup
from specdec.settings import LookupSettings

LOOKUPS: Final[Mapping[str, type[NgramLookup] | type[SuffixLookup]]] = {"ngram": NgramLookup, "suffix": SuffixLookup}


def usable_lookups() -> tuple[str, ...]:
    """The methods of those that can be made on this machine."""
    return tuple(method for method, lookup in LOOKUPS.items() if lookup.is_usable())


def make_lookup(method: str, settings: LookupSettings) -> AnyLookup:
    """The one of this method.

    Raises:
        InvalidRequest: it cannot be used on this machine.
    """
    return LOOKUPS[method](settings)
