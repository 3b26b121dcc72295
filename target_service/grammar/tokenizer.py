"""The checkpoint's tokenizer as llguidance reads it."""

from __future__ import annotations

import logging

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.settings.model import ModelSettings
from specdec.types import ModelInfo

logger = logging.getLogger(__name__)


def read_tokenizer(settings: ModelSettings, model: ModelInfo) -> LLTokenizer | None:
    """Read the tokenizer of a model that is loaded; seconds where the vocabulary is large.

    None where there is none, or a slow one. A text ends by the model's end-of-sequence tokens, or the tokenizer's own.
    """
    if not model.tokenizer_size:  # transformers would make up an empty one
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer or settings.model, trust_remote_code=settings.trust_remote_code
        )
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            return from_tokenizer(tokenizer, eos_token=list(model.eos_token_ids) or None)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        logger.warning("structured outputs are refused: the tokenizer cannot be read: %s", error)
    return None
