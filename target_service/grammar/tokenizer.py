"""The checkpoint's tokenizer as llguidance reads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.settings.model import ModelSettings

logger = logging.getLogger(__name__)


def read_tokenizer(settings: ModelSettings, eos_token_ids: Sequence[int]) -> LLTokenizer | None:
    """Read the tokenizer; seconds where the vocabulary is large. None where there is none, or a slow one.

    ``eos_token_ids`` end a text; empty: the tokenizer's own.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer or settings.model, trust_remote_code=settings.trust_remote_code
        )
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            return from_tokenizer(tokenizer, eos_token=list(eos_token_ids) or None)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        logger.warning("structured outputs are refused: the tokenizer cannot be read: %s", error)
    return None
