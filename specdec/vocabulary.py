"""Whether draft and target have the same vocabulary: a token id must mean the same text to both."""

from __future__ import annotations

from specdec.errors import ModelNotSupported
from specdec.types import ModelInfo


def check_compatible(target: ModelInfo, draft: ModelInfo) -> None:
    """Check that the draft's token ids are the target's.

    The tokenizer fingerprints must be equal; padded rows of the embedding may differ. If neither checkpoint has a
    tokenizer, the numbers of tokens are compared instead. A drafter without a model (``vocab_size`` 0: n-gram, none)
    repeats tokens it was given and fits any target.

    Raises:
        ModelNotSupported: the ids differ; the text names both models.
    """
    if draft.vocab_size == 0:
        return
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise ModelNotSupported(
            f"draft {draft.name!r} ({_tokenizer(draft)}) and target {target.name!r} ({_tokenizer(target)}) have"
            " different tokenizers; choose a draft made for this target, or one with the same tokenizer"
        )
    if _num_tokens(draft) != _num_tokens(target):
        raise ModelNotSupported(
            f"draft {draft.name!r} knows {_num_tokens(draft)} tokens and target {target.name!r} {_num_tokens(target)};"
            " choose a draft with the same vocabulary"
        )


def _num_tokens(info: ModelInfo) -> int:
    return info.tokenizer_size or info.vocab_size


def _tokenizer(info: ModelInfo) -> str:
    if not info.tokenizer_fingerprint:
        return "no tokenizer"
    return f"{_num_tokens(info)} tokens, fingerprint {info.tokenizer_fingerprint[:12]}"
