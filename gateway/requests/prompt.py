"""From the text of a prompt to its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from gateway.requests.limits import check_length, check_text
from gateway.text.processor import TextProcessor
from gateway.text.tokenizer import encodable
from specdec.errors import InvalidRequest
from specdec.types import ModelInfo

#: Of a text with more characters than this per token of the context, the beginning is tokenized first.
MANY_CHARACTERS: Final = 8


def encode_prompt(
    processor: TextProcessor, text: str, model: ModelInfo, *, add_special_tokens: bool = True
) -> list[int]:
    """The token ids of a prompt. Refusing one that is far too long costs little more than reading one that fits.

    Raises:
        ContextLengthExceeded: it leaves no room for an answer.
        InvalidRequest: there is no tokenizer.
    """
    check_text(text, processor.settings, model)
    num_characters = MANY_CHARACTERS * model.max_model_len
    if len(text) > num_characters:
        # What follows may merge with the last tokens of the beginning, but not halve their number.
        num_tokens = len(processor.encode(text[:num_characters], add_special_tokens=False)) // 2
        check_length(num_tokens, model, is_all=False)
    token_ids = processor.encode(text, add_special_tokens=add_special_tokens)
    check_length(len(token_ids), model)
    return token_ids


def encode_prediction(processor: TextProcessor, text: str, model: ModelInfo) -> list[int]:
    """The token ids of what a text is expected to be, as many as the context may hold.

    Raises:
        ContextLengthExceeded: it cannot be that of this model.
        InvalidRequest: there is no tokenizer.
    """
    if not text:
        return []
    check_prediction(processor, text, model)
    return processor.encode(text, add_special_tokens=False)[: model.max_model_len]


def check_prediction(processor: TextProcessor, text: str, model: ModelInfo) -> None:
    """Raise what :func:`encode_prediction` does."""
    processor.require_tokenizer("prediction")
    check_text(text, processor.settings, model, param="prediction")
    if not encodable(text):
        raise InvalidRequest("prediction holds half a surrogate pair, which is no character", param="prediction")


def read_prediction(processor: TextProcessor, raw: bytes, model: ModelInfo, is_large: bool) -> Sequence[int]:
    """The same for a text on its own, as workers read it."""
    return array("I", encode_prediction(processor, raw.decode(), model))
