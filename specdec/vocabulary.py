"""Whether draft and target have the same vocabulary: a token id must mean the same text to both."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import ModelNotSupported
from specdec.types import ModelInfo


def check_shared_tokens(target: str, draft: str) -> bool | None:
    """Whether the tokenizer in the draft's folder knows all tokens of the target's under the same ids, and more. None
    where one of the folders has no ``tokenizer.json``.

    Raises:
        ModelNotSupported: an id of the target means something else to the draft, or nothing; the text names it.
    """
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None:
        return None
    if ours.items() <= theirs.items():
        return len(theirs) > len(ours)
    token = min((text for text, number in ours.items() if theirs.get(text) != number), key=ours.__getitem__)
    raise ModelNotSupported(
        f"draft {draft} and target {target} have different vocabularies ({len(theirs)} and {len(ours)} tokens; token"
        f" {ours[token]} is {token!r} in the target only); speculation needs a draft with the target's tokens"
    )


def _vocabulary(folder: str) -> dict[str, int] | None:
    """Token text → id."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # noqa: PLC0415 (only needed here)

    vocabulary: dict[str, int] = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return vocabulary


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
