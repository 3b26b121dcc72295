"""What a rule is given besides the target's distributions: drafted chains, their q and uniform numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.sampling import sparse
from specdec.sampling.rule import SparseRow
from specdec.sampling.transfer import send


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The drafted chains of B rounds, padded to k tokens (k >= 1, so that no shape is empty)."""

    #: int64 [B, k]; 0 where a chain is shorter.
    token_ids: Tensor
    #: int64 [B], 0 to k.
    lengths: Tensor
    #: int64 [B, k + 1]: row of the target that decides token i; entries after the chain's length mean nothing.
    rows: Tensor

    @classmethod
    def chains(cls, token_ids: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Drafts:
        """Chains whose rows lie one after the other: k_0 + 1 rows of the first, then those of the second, ..."""
        lengths = [len(ids) for ids in token_ids]
        width = max(1, *lengths)
        padded, start = [], 0
        for ids in token_ids:
            padded.append([*ids, *[0] * (width - len(ids)), len(ids), start])
            start += len(ids) + 1
        packed = send(padded, torch.device(device))
        length, first = packed[:, width : width + 1], packed[:, width + 1 :]  # [B, 1]
        steps = torch.arange(width + 1, device=device)
        return cls(packed[:, :width], length.squeeze(1), first + torch.minimum(steps, length))

    @property
    def present(self) -> Tensor:
        """Which entries of ``token_ids`` are drafted tokens: bool [B, k]."""
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device) < self.lengths[:, None]

    def row_at(self, index: Tensor) -> Tensor:
        """Row of the target that decides token ``index`` of each chain: int64 [B] to [B]."""
        return self.rows.gather(1, index[:, None]).squeeze(1)


@dataclass(frozen=True, slots=True, eq=False)
class Q:
    """The distributions drafted tokens were drawn from, sparse: q is 0 off the tokens named."""

    #: int64 [B, k, K]; padding has probability 0.
    token_ids: Tensor
    #: float64 [B, k, K].
    probabilities: Tensor

    @classmethod
    def one_hot(cls, drafts: Drafts) -> Q:
        """q of a deterministic draft: it could propose nothing but the token it proposed."""
        return cls(drafts.token_ids[..., None], drafts.present[..., None].double())

    @classmethod
    def sparse(cls, rows: Sequence[Sequence[SparseRow]], drafts: Drafts) -> Q:
        """q as sent, one row per drafted token; rounds without rows get one-hot ones."""
        if not any(rows):
            return cls.one_hot(drafts)
        unpacked = [[sparse.unpack(row) for row in chain] for chain in rows]
        width = max(len(ids) for chain in unpacked for ids, _ in chain)
        both = np.zeros((2, *drafts.token_ids.shape, width), dtype=np.int64)
        for b, chain in enumerate(unpacked):
            for i, (row_ids, row_weights) in enumerate(chain):
                both[0, b, i, : len(row_ids)] = row_ids
                both[1, b, i, : len(row_ids)] = row_weights
        device = drafts.token_ids.device
        ids, weights = send(torch.from_numpy(both), device).unbind()
        probabilities = weights.double()
        probabilities /= probabilities.sum(-1, keepdim=True).clamp_min_(1.0)
        if not all(rows):
            bare = send([not chain for chain in rows], device)[:, None]  # [B, 1]
            ids[..., 0] = torch.where(bare, drafts.token_ids, ids[..., 0])
            probabilities[..., 0] = torch.where(bare, drafts.present.double(), probabilities[..., 0])
        return cls(ids, probabilities)

    def of(self, token_ids: Tensor) -> Tensor:
        """q of one token per place: int64 [B, k] to float64 [B, k]."""
        return ((self.token_ids == token_ids[..., None]) * self.probabilities).sum(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Uniforms:
    """Independent uniform numbers in (0, 1) for the ratio rules, float64."""

    #: [B, k], one per drafted token.
    accept: Tensor
    #: [B, k], for the draw after a rejection of token i.
    residual: Tensor
    #: [B], for the draw after the last drafted token.
    bonus: Tensor
