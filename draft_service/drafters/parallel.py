"""Drafting in parallel (PARD: An et al. 2025, arXiv 2504.18583): one pass of a causal model drafts a whole round.

The model is fed [tokens without an entry, mask, mask, …]: the row of the last token predicts the first drafted token,
the row of the i-th mask the one after it. Files are those of any causal language model; ``config.json`` names the mask,
an id that texts do not use. The entries of masks are dropped after the pass.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from engine.engine import Engine, Segment
from specdec.checkpoint_config import read_text_config
from specdec.errors import ModelNotSupported
from specdec.settings.option import require

logger = logging.getLogger(__name__)

#: The fields of ``config.json`` with the mask's id, as vLLM reads them: the first that is there counts.
FIELDS: Final = ("pard_token", "ptd_token_id")
#: Tokens of the text that the self-test drafts, and other ids that are fed in place of the mask.
_NUM_TOKENS: Final = 32
_NUM_OTHERS: Final = 4
#: Share of the text that the first mask must predict; other ids predict some by chance.
_LEAST_SHARE: Final = 0.25


def mask_token(folder: str, wanted: bool | None) -> int | None:
    """The id of the mask that a checkpoint was trained with; None where it drafts one token a pass.

    ``wanted``: the option ``parallel_drafting``; None leaves it to the checkpoint.

    Raises:
        InvalidRequest: it is wanted, and the checkpoint names no mask.
        ModelNotSupported: what the checkpoint names is no token of its vocabulary.
    """
    if wanted is False:
        return None
    # Where there is none, loading says what is wrong.
    config = read_text_config(folder) if Path(folder, "config.json").is_file() else {}
    field = next((name for name in FIELDS if config.get(name) is not None), None)
    require(
        field is not None or not wanted,
        "parallel_drafting",
        f"parallel_drafting is true, and {folder}/config.json has no pard_token: this draft was not trained to draft in"
        " parallel; leave the option out",
    )
    if field is None:
        return None
    token, size = config[field], config.get("vocab_size")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < (size or token + 1):
        raise ModelNotSupported(
            f"{field} is {token!r} in {folder}/config.json; the mask of a draft that drafts in parallel is one of its"
            f" token ids, 0 to {(size or 0) - 1}"
        )
    return token


def check_mask(engine: Engine, prompt: Sequence[int], mask_token_id: int) -> bool:
    """Whether the first mask predicts the model's own greedy text after a prompt: a quarter of it, and more than other
    ids in its place; where not, warn.

    Called on the device thread. A wrong mask costs speed only, and no error would show it: the draft would look like a
    weak one.
    """
    size = engine.info.tokenizer_size or engine.info.vocab_size
    others = [size * (i + 1) // (_NUM_OTHERS + 1) for i in range(_NUM_OTHERS)]
    masks = [mask_token_id, *(other for other in others if other != mask_token_id)]
    room = min(engine.info.max_model_len, engine.info.kv_cache_tokens) - _NUM_TOKENS - len(masks)
    prompt = prompt[: max(0, room)]
    if len(prompt) < 2:
        return True
    num_right = [0] * len(masks)
    sequence = engine.pool.open(len(prompt) + _NUM_TOKENS + len(masks))
    try:
        engine.forward([Segment(sequence, prompt[:-1], 0)])
        token, guesses = prompt[-1], [-1] * len(masks)
        for _ in range(_NUM_TOKENS):
            # Each mask follows the token, in a branch of its own.
            rows = Segment(sequence, [token, *masks], 1 + len(masks), parents=(-1, *[0] * len(masks)))
            after, *next_guesses = engine.forward([rows])[:, :size].argmax(-1).tolist()
            engine.pool.rollback(sequence, sequence.length - len(masks))
            num_right = [count + (guess == after) for count, guess in zip(num_right, guesses, strict=True)]
            token, guesses = after, next_guesses
    finally:
        engine.pool.release(sequence)
    by_mask, *by_others = num_right
    if by_mask >= _LEAST_SHARE * (_NUM_TOKENS - 1) and by_mask > max(by_others):
        return True
    logger.warning(
        "SELF-TEST FAILED: after the mask token %d, draft %s predicts %d of %d tokens of its own text. The text that is"
        " served is right, but only the first token of a draft will be accepted. Usual causes: pard_token in"
        " config.json is not the id that the draft was trained with; it is a token of ordinary text; the draft was not"
        " trained to draft in parallel (docs/drafters.md#draft-model)",
        mask_token_id,
        engine.info.name,
        by_mask,
        _NUM_TOKENS - 1,
    )
    return False


def check_prompt(folder: str) -> list[int]:
    """Tokens that the self-test starts from: code and prose by the checkpoint's tokenizer; empty where it has none."""
    path = Path(folder, "tokenizer.json")
    if not path.is_file():
        return []
    from tokenizers import Tokenizer  # noqa: PLC0415 (only drafts that draft in parallel need it)

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except (OSError, ValueError, json.JSONDecodeError):
        return []
    return list(tokenizer.encode(_PROMPT, add_special_tokens=False).ids)


_PROMPT: Final = (
    "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n\n"
    "def write_lines(path, lines):\n    with open(path, 'w') as file:\n        "
)
