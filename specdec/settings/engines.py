"""A gateway in front of engines: which addresses are engines, and which options they cannot honour."""

from __future__ import annotations

from typing import Any, Final

from specdec.settings.option import options_of, require

#: What the address of engines begins with: a URL, a name or a file follows.
ENGINE_PREFIX: Final = "openai+"
#: The environment variable that holds the key shown to engines.
TARGET_API_KEY_VARIABLE: Final = "TANDEM_TARGET_API_KEY"
#: Options of drafting and verification, which an engine does by itself.
_DRAFT_OPTIONS: Final = (
    *("drafts", "lookup", "num_speculative_tokens", "disable_by_batch_size", "fixed_draft_length"),
    *("draft_timeout_s", "verification", "untrusted_drafts"),
)


def is_engine(address: str) -> bool:
    """Whether an address of a target is an engine's."""
    return address.startswith(ENGINE_PREFIX)


def check_engines(settings: Any) -> None:
    """Check the options of a gateway that has engines among its targets.

    Raises:
        InvalidRequest: other targets are Tandem's own, an option cannot be honoured, or the tokenizer is missing.
    """
    own = [address for address in settings.targets if not is_engine(address)]
    require(
        not own,
        "targets",
        f"targets holds engines and Tandem's own {', '.join(own)}; their texts differ, so a request could not move from"
        " one to the other: start a gateway for each kind",
    )
    options = options_of(type(settings))
    for name in (*_DRAFT_OPTIONS, "max_client_kv_share"):
        value = getattr(settings, name)
        require(
            value == options[name].default,
            name,
            f"{name} is {value!r}, which engines cannot honour: they draft, verify and share their KV cache by"
            " themselves; leave it out, and set the engine's own options",
        )
    require(
        settings.tokenizer is not None,
        "tokenizer",
        "tokenizer is not given, and engines do not hand theirs out; give the folder of the model's tokenizer",
    )
    require(
        settings.target_api_key is None or settings.target_api_key_file is None,
        "target_api_key_file",
        "target_api_key and target_api_key_file are both given; give one",
    )
