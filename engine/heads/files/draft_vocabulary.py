"""The vocabulary a head drafts from, in its files: a map between draft ids and the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.heads.files.fields import Fields
from engine.heads.head import MappedHead


def take_vocabulary(fields: Fields, tensors: dict[str, Tensor], size: int, vocab_size: int) -> Tensor:
    """The target ids of the draft vocabulary, int64 [Vd]; takes ``d2t`` and ``t2d`` out of the tensors.

    ``d2t`` holds the *distance* from a draft id to its target id. One of the two maps is enough; without both, ids mean
    the same in both vocabularies, which then are of one size.

    Raises:
        ModelNotSupported: there is no map, or not one of ``size`` different ids below ``vocab_size``.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is not None:
        token_ids = torch.arange(len(d2t)) + d2t.long()
    elif t2d is not None:
        token_ids = t2d.bool().nonzero().flatten()
    elif size == vocab_size:
        return torch.arange(size)
    else:
        raise fields.refusal("draft_vocab_size", f"the target has {vocab_size} tokens and d2t is missing")
    is_distinct = len(set(token_ids.tolist())) == len(token_ids) == size
    if not is_distinct or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise fields.refusal("draft_vocab_size", f"d2t or t2d does not name as many different ids below {vocab_size}")
    return token_ids


def set_vocabulary(head: MappedHead, token_ids: Tensor) -> None:
    """Let a head that was made without memory draft these target ids, int64 [Vd]."""
    config = head.config
    head.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    head.t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    head.set_vocabulary(token_ids)
