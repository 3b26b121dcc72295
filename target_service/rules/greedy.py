"""Temperature 0, the same under every rule: accept drafts while they are the argmax, then emit the argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from target_service.rules.drafts import Drafts


def verify(logits: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """Edited logits [R, V] to (accepted [B], next token [B], valid [R]); a row is valid if its maximum is finite."""
    best, choices = logits.max(-1)
    valid = best.abs() < torch.inf
    return *follow(choices, valid, drafts), valid


def follow(choices: Tensor, valid: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """Walk each chain while its token is the target's own choice; then emit that choice.

    ``choices`` int64 [R] and ``valid`` bool [R] to (accepted [B], next token [B]). A choice never depends on the draft,
    so neither does the text; a row that is not valid has none, and there the walk ends.
    """
    chosen = choices[drafts.rows]  # [B, k + 1]
    agree = (chosen[:, :-1] == drafts.token_ids) & valid[drafts.rows[:, :-1]] & drafts.present
    accepted = agree.long().cumprod(1).sum(1)
    return accepted, torch.gather(chosen, 1, accepted[:, None]).squeeze(1)
