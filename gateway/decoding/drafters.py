"""What drafts for a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafters:
    """Lookups in the gateway, a draft service, both or neither."""

    #: Methods of the lookups, best first.
    lookups: tuple[str, ...] = ()
    #: Method of the draft services that may draft; empty: any of them; None: none of them.
    service: str | None = ""
