"""The tokens an EAGLE-3 head can draft: those the target writes most often."""

from collections.abc import Iterable

import torch


def count_tokens(rows: Iterable[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """How often each id stands in the int tensors: int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in rows:
        counts += torch.bincount(ids.flatten().long(), minlength=vocab_size)
    return counts


def most_frequent(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent ids, ascending (int64 [size]); of equally frequent ones the smaller first."""
    order = counts.argsort(descending=True, stable=True)
    return order[:size].sort().values


def draft_ids(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The target's ids to the draft's, -1 where it has none: int64 [vocab_size]."""
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
    to_draft[token_ids] = torch.arange(len(token_ids))
    return to_draft
