"""A checkpoint's tokenizer, without torch: ``tokenizers`` does the work, Hugging Face's files say how.

``transformers.AutoTokenizer`` would import torch wherever it is installed, so its part (which special tokens are
added, what the chat template may name) is done here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec.errors import InvalidRequest

#: Roles of special tokens in tokenizer_config.json and special_tokens_map.json.
ROLES: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextTokenizer:
    """Text to ids and back, as the checkpoint's own tokenizer does it."""

    def __init__(self, tokenizer: Tokenizer, config: dict[str, Any], *, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        #: The checkpoint's chat template; None when it has none.
        self.chat_template = chat_template
        #: The checkpoint's response template; None when it has none.
        self.response_template = template if isinstance(template := config.get("response_template"), dict) else None
        #: Texts of the special tokens by role, for chat templates.
        self.special_tokens = {role: text for role in ROLES if (text := _token_text(config.get(role))) is not None}
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._bytes: list[bytes | None] = [None] * tokenizer.get_vocab_size(with_added_tokens=True)
        self._style = _decoder_style(tokenizer)
        self._prefix = _missing_bos(tokenizer, config, self.special_tokens)

    @classmethod
    def load(cls, folder: str | Path) -> TextTokenizer:
        """Read ``tokenizer.json``, or ``vocab.json`` with ``merges.txt``, and the settings beside it.

        Raises:
            InvalidRequest: the folder holds neither, or they cannot be read.
        """
        folder = Path(folder)
        config = _read_config(folder)
        try:
            tokenizer = _read_tokenizer(folder, config)
        except InvalidRequest:
            raise
        except Exception as error:  # tokenizers raises bare exceptions
            raise InvalidRequest(f"the tokenizer in {folder} cannot be read: {error}", param="tokenizer") from error
        return cls(tokenizer, config, chat_template=_read_chat_template(folder, config))

    def fingerprint(self) -> str:
        """SHA-256 over the lines ``id TAB token LF`` in order of the ids; equal to the model services' prints."""
        digest = hashlib.sha256()
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
            digest.update(f"{token_id}\t{token}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """Tokens known, added ones included."""
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Raises:
            InvalidRequest: the text holds half a surrogate pair.
        """
        if not encodable(text):
            raise InvalidRequest("the text holds half a surrogate pair, which is no character", param="prompt")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a sequence; ids beyond the vocabulary have none."""
        known = [token_id for token_id in token_ids if token_id < len(self._bytes)]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    @property
    def added_texts(self) -> dict[int, str]:
        """The texts of the tokens beside the vocabulary, markers most of them, by id."""
        return {token_id: text.decode() for token_id, text in self._added.items()}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a marker rather than text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes in running text; None where they depend on its neighbours."""
        if token_id >= len(self._bytes):
            return b""
        if (known := self._bytes[token_id]) is None and self._style is not None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token on its own, for log-probabilities; bytes that are no characters show as U+FFFD."""
        data = self.token_bytes(token_id)
        return data.decode("utf-8", "replace") if data is not None else self.decode([token_id])

    def raw_token(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def _find_bytes(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._style == "byte_level":
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:
                return str(token).encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return str(token).replace("\u2581", " ").encode()


def encodable(text: str) -> bool:
    """Whether a text has a UTF-8 form; half a surrogate pair, which JSON can spell, has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER: Final = _byte_alphabet()


def _decoder_style(tokenizer: Tokenizer) -> str | None:
    """ "byte_level" (GPT-2 and its heirs), "sentencepiece", or None: decode by window."""
    if tokenizer.decoder is None:
        return None
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    replaces = [part for part in parts if part["type"] == "Replace"]
    plain = all(part["pattern"] == {"String": "\u2581"} and part["content"] == " " for part in replaces)
    spaced = bool(replaces) or "Metaspace" in kinds
    return "sentencepiece" if plain and spaced and kinds <= SENTENCEPIECE_PARTS else None


SENTENCEPIECE_PARTS: Final = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _missing_bos(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> list[int]:
    """The beginning-of-sequence id where the settings ask for it and the tokenizer's own template leaves it out."""
    bos = tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None
    if bos is None or not config.get("add_bos_token"):
        return []
    return [] if tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos] else [bos]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="tokenizer") from None
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path} must hold an object", param="tokenizer")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise InvalidRequest(f"the tokenizer folder {folder} does not exist", param="tokenizer")
    return _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")


def _read_tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    if (path := folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not vocab.is_file() or not merges.is_file():
        raise InvalidRequest(
            f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; give --tokenizer with a folder that"
            " has one, or convert the tokenizer once with transformers:"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
            param="tokenizer",
        )
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    defaults = {} if any(role in config for role in ROLES) else {"eos_token": "<|endoftext|>"}
    for role in ROLES:
        entry = (config | defaults).get(role)
        if (text := _token_text(entry)) is not None and tokenizer.token_to_id(text) is not None:
            options = entry if isinstance(entry, dict) else {}
            tokenizer.add_special_tokens([AddedToken(text, special=True, **_strip_options(options))])
    return tokenizer


def _strip_options(entry: dict[str, Any]) -> dict[str, bool]:
    """How an added token treats its surroundings. ``normalized`` is no concern: byte-level BPE normalizes nothing."""
    return {name: bool(entry[name]) for name in ("lstrip", "rstrip", "single_word") if name in entry}


def _token_text(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
