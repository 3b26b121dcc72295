"""Tokens to text as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol


class TokenTexts(Protocol):
    """What a detokenizer must know of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes in running text; None where a token's text depends on its neighbours."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a marker rather than text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        ...


class Detokenizer:
    """Converts tokens to text one by one. A character split over tokens comes out whole, with its last token.

    Bytes that are no UTF-8 become U+FFFD as soon as that is certain. Constant work per token.
    ``tokenizers.DecodeStream`` takes longer (1.1 against 0.65 us per token), holds invalid bytes until a valid
    character follows, and loses an unfinished character at the end: it has no flush.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        *,
        skip_special_tokens: bool,
        kept: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        """``kept`` special tokens are not skipped. ``context`` are the tokens before the first one; only tokenizers
        without token bytes need them, and these skip all or no special tokens.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._kept = kept
        self._window = Window(tokenizer, skip_special_tokens and not kept, context)

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token."""
        if self._skip_special and self._tokenizer.is_special(token_id) and token_id not in self._kept:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data is None:
            return self._window.feed(token_id)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: an unfinished character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) + self._window.flush()


#: Tokens of a window kept as context when its text was given out.
CONTEXT_TOKENS = 4
#: Tokens after which a text that still ends in U+FFFD is given out as it is: no character has more bytes.
UNDECIDED_TOKENS = 4


class Window:
    """Text by decoding the last few tokens again, for tokenizers whose tokens have no text of their own."""

    def __init__(self, tokenizer: TokenTexts, skip_special_tokens: bool, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._tokens = list(context[-CONTEXT_TOKENS:])
        self._num_given = len(self._tokens)
        self._given = self._decode(self._tokens)

    def feed(self, token_id: int) -> str:
        """The text that became certain with this token."""
        self._tokens.append(token_id)
        undecided = len(self._tokens) - self._num_given
        text = self._decode(self._tokens)
        if text.endswith("\ufffd") and undecided < UNDECIDED_TOKENS:
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What is left at the end."""
        return self._give(self._decode(self._tokens)) if len(self._tokens) > self._num_given else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._tokens = self._tokens[-CONTEXT_TOKENS:]
        self._num_given = len(self._tokens)
        self._given = self._decode(self._tokens)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special) if tokens else ""
