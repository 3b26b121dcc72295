"""How an engine reaches the draft service, from its own free-form options or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

PREFIX: Final = "TANDEM_"


@dataclass(frozen=True, slots=True)
class RemoteDraftSettings:
    """Options of a remote drafter; the environment has them as ``TANDEM_DRAFT``, ``TANDEM_TIMEOUT_MS`` and so on."""

    #: Address of the draft service, ``host:port`` or a Unix domain socket.
    draft: str = "127.0.0.1:50062"
    #: Milliseconds a step waits for its drafts; sequences without one decode plainly in the next step.
    timeout_ms: int = 100
    #: Proposals drafted ahead of each step's result, for a draft service with a device of its own.
    num_ahead_proposals: int = 0
    #: Tokens for which the draft service reserves cache at a time; a longer sequence is opened again.
    reserve_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, least, most in (
            ("timeout_ms", 1, 60_000),
            ("num_ahead_proposals", 0, 15),
            ("reserve_tokens", 1, 2**20),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}, outside [{least}, {most}]")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """``given`` wins over the environment.

        Raises:
            ValueError: an option is unknown, or its value is none.
        """
        known: dict[str, type[Any]] = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(cls)}
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"tandem has no option {', '.join(unknown)}; it has {', '.join(known)}")
        values = {name: os.environ[PREFIX + name.upper()] for name in known if PREFIX + name.upper() in os.environ}
        return cls(**{name: known[name](value) for name, value in (values | dict(given)).items()})
