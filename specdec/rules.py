"""The verification rules by name, and what a ratio rule must know of a draft. Free of torch, for the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rule(StrEnum):
    """How a target accepts or rejects drafted tokens; see ``docs/verification.md``."""

    TOKEN = "token"
    BLOCK = "block"
    COUPLED = "coupled"


@dataclass(frozen=True, slots=True)
class SparseRow:
    """The distribution one drafted token was drawn from: q(v) = weight / sum of weights, 0 elsewhere."""

    #: Token ids and weights in the form that travels; :mod:`specdec.sampling.sparse` reads and writes it.
    packed: bytes
