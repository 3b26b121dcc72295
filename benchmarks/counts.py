"""Counts since a start, and what was counted between two moments."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A base for dataclasses whose fields are numbers."""

    def since(self, before: Self) -> Self:
        """What happened from ``before`` to now, both counted since the start."""
        return self._with(before, -1.0)

    def plus(self, other: Self) -> Self:
        """Two windows together."""
        return self._with(other, 1.0)

    def _with(self, other: Self, sign: float) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(**{name: getattr(self, name) + sign * getattr(other, name) for name in names})
