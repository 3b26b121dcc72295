"""Passes over token trees on draft heads: each node is fed with what its parent came to.

They take the segments that :meth:`Engine.forward <specdec.engine.engine.Engine.forward>` takes: first the committed
tokens of every session, then, level by level, all nodes of its tree so far, of which the last ``num_logits`` are new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.engine.batch import Segment
from specdec.engine.kv_pool import KVSequence
from specdec.heads.medusa import MedusaHeads
from specdec.heads.mlp_speculator import MlpSpeculator
from specdec.heads.paged import PagedHead
from specdec.sampling.transfer import send


class PagedTreePasses:
    """On an EAGLE head. Nodes are fed anew at every level: attention sees all rows of a tree in one pass."""

    def __init__(self, paged: PagedHead, features: Mapping[KVSequence, Tensor]) -> None:
        """``features``: the target's states of the committed tokens that are fed first."""
        self._paged = paged
        self._features = features
        #: What the last committed token and the nodes came to, [1 + nodes, H].
        self._states: dict[KVSequence, Tensor] = {}

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits over the target's vocabulary, float32 [new rows, V]."""
        known = self._states
        is_first = not known
        if is_first:
            states = torch.cat([self._features[segment.sequence] for segment in segments])
        else:
            states = torch.cat([_of_parents(known[segment.sequence], segment.parents) for segment in segments])
        x, logits = self._paged.step(segments, states, are_features=is_first)
        for segment, rows in zip(segments, _split(x, segments), strict=True):
            known[segment.sequence] = rows if is_first else torch.cat((known[segment.sequence], rows))
        return logits


class MlpTreePasses:
    """On an MLP speculator: the states of a level follow from those of the level before."""

    def __init__(self, head: MlpSpeculator, states: Mapping[KVSequence, Tensor]) -> None:
        """``states``: the target's, [1, H] each."""
        self._head = head
        self._states = {sequence: head.start(state) for sequence, state in states.items()}
        self._step = 0

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits over the target's vocabulary, float32 [new rows, V]."""
        head, known = self._head, self._states
        states = []
        for segment in segments:
            parents = list(segment.parents)[-segment.num_logits :] or [-1]
            states.append(_of_parents(known[segment.sequence], parents))
        ids = [token for segment in segments for token in list(segment.token_ids)[-segment.num_logits :]]
        x = head(send(ids, states[0].device), torch.cat(states), self._step)
        for segment, rows in zip(segments, _split(x, segments), strict=True):
            known[segment.sequence] = torch.cat((known[segment.sequence], rows)) if self._step else rows
        logits = head.logits(x, self._step).float()
        self._step += 1
        return logits


class MedusaTreePasses:
    """On Medusa heads: all nodes of a level have the same logits."""

    def __init__(self, heads: MedusaHeads, states: Mapping[KVSequence, Tensor], num_levels: int) -> None:
        """``states``: the target's, [1, H] each."""
        self._logits = {sequence: heads(state[0], num_levels).float() for sequence, state in states.items()}
        self._level = 0

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Logits over the target's vocabulary, float32 [new rows, V]."""
        level, self._level = self._level, self._level + 1
        rows = [self._logits[segment.sequence][level].expand(segment.num_logits, -1) for segment in segments]
        return torch.cat(rows)


def _split(rows: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    """The new rows of each segment."""
    return torch.split(rows, [segment.num_logits for segment in segments])


def _of_parents(states: Tensor, parents: Sequence[int]) -> Tensor:
    """The rows of the nodes with these indices, -1 for the root: row 0."""
    return states.index_select(0, send([parent + 1 for parent in parents], states.device))
