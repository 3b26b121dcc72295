"""What is asked for when tokens are drafted: one chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_sequence import KVSequence
from engine.sampling.state import SamplingState
from specdec.rules import Rule

#: One entry per job, written by another thread while the chains are drafted; not 0: the job's chain may end here.
StopFlags = npt.NDArray[np.int32]


class Drawing(Protocol):
    """How one chain is drawn, whatever computes its logits: see :class:`ChainJob`."""

    @property
    def num_tokens(self) -> int:
        """Tokens wanted."""
        ...

    @property
    def state(self) -> SamplingState:
        """The session's."""
        ...

    @property
    def rule(self) -> Rule:
        """The rule the chain will be verified by."""
        ...


@dataclass(frozen=True, slots=True)
class ChainJob:
    """One chain to draft, or, with ``num_tokens`` 0, tokens to feed alone."""

    sequence: KVSequence
    #: Fed first, at least one; drafting continues after them.
    token_ids: Sequence[int]
    num_tokens: int
    state: SamplingState
    rule: Rule
    #: What a draft head is fed with its tokens: the target's hidden states before them, float32 or bfloat16
    #: [len(token_ids), num_features], contiguous, on the CPU. Of a model that drafts in parallel what is added to the
    #: embeddings of the tokens; masks get the last row. None: nothing.
    features: torch.Tensor | None = None
    #: Of the features, where the head has several prediction layers.
    positions: Sequence[int] = ()
    #: A model that drafts in parallel (PARD, arXiv 2504.18583) is fed this after ``token_ids``, ``num_masks`` times in
    #: the same pass: one row of logits for each token drafted. None: each token is drawn, then fed.
    mask_token_id: int | None = None

    @property
    def num_masks(self) -> int:
        """Masks fed; their cache entries are dropped after the pass."""
        return 0 if self.mask_token_id is None else max(0, self.num_tokens - 1)
