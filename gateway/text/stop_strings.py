"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


class StopStrings:
    """The automaton of Aho and Corasick (1975) over a request's stop strings. Its samples share it.

    A state is the longest end of the text that is the beginning of a stop string. Edges are made when a text first
    takes them, so many strings cost little until their text appears: the work per character does not grow with their
    number.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = frozenset(stops)
        self._sorted = sorted(self._stops)
        self._lengths = sorted({len(stop) for stop in self._stops}, reverse=True)
        #: By state and character: the next state, and the longest stop string that ends there.
        self.edges: dict[tuple[str, str], tuple[str, str | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._stops)

    def make_edge(self, state: str, character: str) -> tuple[str, str | None]:
        """The edge from ``state`` over ``character``."""
        after = state + character
        while not self._begins(after):
            after = after[1:]
        ends = (after[-length:] for length in self._lengths if length <= len(after))
        edge = self.edges[state, character] = after, next((end for end in ends if end in self._stops), None)
        return edge

    def _begins(self, text: str) -> bool:
        """Whether a stop string begins with the text."""
        at = bisect_left(self._sorted, text)
        return at < len(self._sorted) and self._sorted[at].startswith(text)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stop string that appeared."""

    #: Text before it, or up to its end where it is included.
    text: str
    stop: str


class StopFinder:
    """Finds stop strings in the text of one sample, and holds back only what may still become one.

    The first stop string to be complete wins (the longest, where several end at one character), so the result does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        #: The state, which is the text held back.
        self._held = ""

    def feed(self, text: str) -> str | Stopped:
        """The text that can be given out now, or the end."""
        if not self._stops:
            return text
        known, edges, state = self._held + text, self._stops.edges, self._held
        for end, character in enumerate(text, len(state) + 1):
            state, stop = edges.get((state, character)) or self._stops.make_edge(state, character)
            if stop is not None:
                self._held = ""
                return Stopped(known[: end if self._include else end - len(stop)], stop)
        self._held = state
        return known[: len(known) - len(state)]

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held
