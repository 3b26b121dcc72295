"""Settings of who may use a gateway, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from specdec.settings.option import check_options, option, require

#: The environment variable that holds keys: those that a gateway takes, or that a command shows.
API_KEY_VARIABLE: Final = "TANDEM_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may use: a key, or an address where no keys are asked for. A key file overrides them by key."""

    GROUPS: ClassVar = {"limits of a client": "max_client_requests"}

    max_client_requests: int | None = option(None, "requests of one client at once; one more gets 429", ge=1)
    max_client_sequences: int | None = option(None, "sequences of one client at once; n samples are n", ge=1)
    max_client_kv_share: float | None = option(
        None, "share of a target's KV cache that open sessions of one client may hold; others wait", gt=0, le=1
    )
    max_client_attachments: int | None = option(
        None, "drafts that one client brings at once (`tandem attach`); default: 4", ge=0
    )
    client_requests_per_minute: int | None = option(None, "requests of one client a minute", ge=1)
    client_tokens_per_minute: int | None = option(None, "prompt and generated tokens of one client a minute", ge=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings(ClientLimits):
    """Who may use a gateway."""

    GROUPS: ClassVar = {"access": "api_key"}

    api_key: tuple[str, ...] = option(
        (), "keys that clients send as bearer tokens; without any key everybody may", env=API_KEY_VARIABLE
    )
    api_key_file: str | None = option(None, "file of hashed keys, a line of `tandem key` each; read when it changes")
    allowed_hosts: tuple[str, ...] = option(
        (), "names in Host that are this server's, *.example.com or *; by default, if keyless, those of this machine"
    )
    allowed_origins: tuple[str, ...] = option((), "web pages that browsers let use the API, or *")
    allowed_methods: tuple[str, ...] = option((), "HTTP methods they may use; by default all")
    allowed_headers: tuple[str, ...] = option((), "HTTP headers they may send; by default all")
    allow_credentials: bool = option(False, "let them send cookies and logins")

    def __post_init__(self) -> None:
        check_options(self)
        for number, key in enumerate(self.api_key, 1):
            require(
                key.isascii() and key.isprintable() and not set(key) & {" ", ","} and bool(key),
                "api_key",
                f"api_key number {number} (--api-key, or {API_KEY_VARIABLE}) holds a space, a comma or no character at"
                " all; use letters and digits",
            )
        for host in self.allowed_hosts:
            require(
                not set(host) & {"/", ":", ","} and "*" not in host.removeprefix("*"),
                "allowed_hosts",
                f"allowed_hosts holds {host!r}; write each as a name without scheme and port, *.example.com, or *",
            )
        for origin in self.allowed_origins:
            require(
                origin == "*" or "://" in origin,
                "allowed_origins",
                f"allowed_origins holds {origin!r}; write each as scheme://host[:port], or *",
            )

        require(
            not (self.allow_credentials and "*" in self.allowed_origins),
            "allow_credentials",
            "allow_credentials is given with allowed_origins *: every web page could act for a browser's user; name the"
            " origins",
        )

    @property
    def asks_for_key(self) -> bool:
        """Whether every caller must show a key."""
        return bool(self.api_key) or self.api_key_file is not None
