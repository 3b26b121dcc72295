"""Rows in the middle of chains that were drafted elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState


def rows_after(states: Sequence[SamplingState], prefixes: Sequence[Sequence[int]]) -> Rows:
    """One row per state, after its committed tokens and the drafted tokens ``prefixes``, which may differ in length."""
    width = max(map(len, prefixes), default=0)
    prefix = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in prefixes], dtype=torch.int64)
    return Rows(states, prefix.reshape(len(states), width), [len(ids) for ids in prefixes])
