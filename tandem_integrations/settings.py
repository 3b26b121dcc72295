"""How an engine reaches the draft service, from its own free-form options or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from specdec.errors import InvalidRequest
from specdec.settings.listening import TlsFiles
from specdec.settings.option import check_options, option, options_of, require

PREFIX: Final = "TANDEM_"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDraftSettings:
    """Options of a remote drafter; the environment has them as ``TANDEM_DRAFT``, ``TANDEM_TIMEOUT_MS`` and so on."""

    draft: str = option("127.0.0.1:50062", "address of the draft service, host:port or a Unix domain socket")
    timeout_ms: int = option(100, "time a step waits for drafts; sequences without one decode plainly", ge=1, le=60_000)
    reserve_tokens: int = option(
        1024,
        "tokens a sequence may grow by until it is opened again; more than num_speculative_tokens",
        ge=2,
        le=2**20,
    )
    ssl_ca_certs: str | None = option(None, "PEM file of the CAs that the draft service is trusted by; it enables TLS")
    ssl_certfile: str | None = option(None, "PEM file of the certificate that the draft service sees")
    ssl_keyfile: str | None = option(None, "PEM file of its private key")

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def tls(self) -> TlsFiles:
        """The files of TLS; empty: plain text."""
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """``given`` wins over the environment.

        Raises:
            InvalidRequest: an option is unknown, or its value is none.
        """
        known = options_of(cls)
        unknown = ", ".join(sorted(set(given) - set(known)))
        require(not unknown, "tandem", f"tandem has no option {unknown}; it has {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, each in known.items():
            variable = PREFIX + name.upper()
            if (text := os.environ.get(variable)) is not None:
                try:
                    values[name] = int(text) if int in each.kinds else text
                except ValueError:
                    raise InvalidRequest(f"{variable} is {text!r}; it must be a whole number", param=name) from None
        return cls(**(values | dict(given)))
