"""Lookups by their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from specdec.lookup.base import AnyLookup
from specdec.lookup.ngram import NgramLookup
from specdec.lookup.suffix import SuffixLookup
from specdec.settings import LookupSettings

LOOKUPS: Final[Mapping[str, Callable[[LookupSettings], AnyLookup]]] = {"ngram": NgramLookup, "suffix": SuffixLookup}


def make_lookups(methods: tuple[str, ...], settings: LookupSettings) -> tuple[AnyLookup, ...]:
    """Those of these methods, in order of preference.

    Raises:
        InvalidRequest: one cannot be used on this machine.
    """
    return tuple(LOOKUPS[method](settings) for method in methods)
