"""What a gateway has to know of engines, which do not tell it: the tokenizer, and the key to show."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gateway.text.tokenizer import TextTokenizer
from specdec.errors import InvalidRequest
from specdec.settings import GatewaySettings
from specdec.settings.listening import TlsFiles

#: A text whose tokens tell tokenizers apart: code, numbers, spaces, other scripts.
SAMPLE_TEXT: Final = "def f(x):\n    return x + 1234.5  # naïve café, 東京 🙂 — “quotes”\n\n\tThe end."


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The same for all engines of a gateway."""

    #: The tokenizer's: number of tokens, fingerprint, and the ids of :data:`SAMPLE_TEXT` without special tokens.
    tokenizer_size: int
    tokenizer_fingerprint: str
    sample_ids: tuple[int, ...]
    #: Ids the model knows, those that only fill its embedding up included.
    vocab_size: int
    key: str | None = field(default=None, repr=False)
    tls: TlsFiles = field(default_factory=TlsFiles)

    @classmethod
    def read(cls, settings: GatewaySettings, tokenizer: TextTokenizer) -> EngineSpec:
        """From the options of a gateway.

        Raises:
            InvalidRequest: the key cannot be read.
        """
        assert settings.tokenizer is not None, "the settings ask for one"
        return cls(
            tokenizer_size=tokenizer.size,
            tokenizer_fingerprint=tokenizer.fingerprint(),
            sample_ids=tuple(tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)),
            vocab_size=max(tokenizer.size, _vocab_size(Path(settings.tokenizer) / "config.json")),
            key=_key(settings),
            tls=settings.backend_tls,
        )


def _vocab_size(config: Path) -> int:
    """Of the model's config beside the tokenizer; 0: there is none, or it does not say."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    size = content.get("vocab_size") if isinstance(content, dict) else None
    return size if isinstance(size, int) else 0


def _key(settings: GatewaySettings) -> str | None:
    """The key shown to engines. Messages never hold it."""
    key, path = settings.target_api_key, settings.target_api_key_file
    if path is not None:
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"target_api_key_file is {path!r}, which cannot be read: {error}", param="target_api_key_file"
            ) from None
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise InvalidRequest(
            "the key for engines is empty, or holds a space or a character that is not printable ASCII",
            param="target_api_key" if path is None else "target_api_key_file",
        )
    return key
