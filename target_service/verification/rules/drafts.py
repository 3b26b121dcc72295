"""The inputs of a rule besides the target's distributions: drafted chains or trees, their q and uniform numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.sampling import sparse
from engine.sampling.transfer import send
from specdec import trees
from specdec.rules import SparseRow


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The drafted tokens of B rounds, padded to k (k >= 1, so that no shape is empty): all chains, or all trees.

    The *places* of a round are where a token of the target's may stand: 0 is the first, i + 1 the one after drafted
    token i. So a walk along drafted tokens ends at a place; in a chain that is the number of tokens accepted.
    """

    #: int64 [B, k]; 0 where fewer were drafted.
    token_ids: Tensor
    #: int64 [B], 0 to k.
    lengths: Tensor
    #: int64 [B, k + 1]: row of the target that decides at each place; entries after the round's length mean nothing.
    rows: Tensor
    #: int64 [B, k]: the parent of each token, -1 for the prefix and for padding. None: chains.
    parents: Tensor | None = None

    @classmethod
    def chains(cls, token_ids: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Drafts:
        """Chains whose rows lie one after the other: k_0 + 1 rows of the first, then those of the second, ..."""
        return cls._of(token_ids, [], torch.device(device))

    @classmethod
    def trees(
        cls, token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device | str = "cpu"
    ) -> Drafts:
        """Trees, their rows likewise; siblings differ."""
        return cls._of(token_ids, parents, torch.device(device))

    @classmethod
    def _of(cls, token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device) -> Drafts:
        lengths = [len(ids) for ids in token_ids]
        width = max(1, *lengths)
        padded, start = [], 0
        for b, ids in enumerate(token_ids):
            padding = width - len(ids)
            follows = [*parents[b], *[-1] * padding] if parents else []
            padded.append([*ids, *[0] * padding, len(ids), start, *follows])
            start += len(ids) + 1
        packed = send(padded, device)
        length, first = packed[:, width : width + 1], packed[:, width + 1 : width + 2]  # [B, 1]
        steps = torch.arange(width + 1, device=device)
        rows = first + torch.minimum(steps, length)
        return cls(packed[:, :width], length.squeeze(1), rows, packed[:, width + 2 :] if parents else None)

    @property
    def present(self) -> Tensor:
        """Which entries of ``token_ids`` are drafted tokens: bool [B, k]."""
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device) < self.lengths[:, None]

    @property
    def deciding(self) -> Tensor:
        """Row of the target that decides each drafted token: int64 [B, k]."""
        return self.rows[:, :-1] if self.parents is None else self.rows.gather(1, self.parents + 1)

    def row_at(self, place: Tensor) -> Tensor:
        """Row of the target that decides at a place of each round: int64 [B] to [B]."""
        return self.rows.gather(1, place[:, None]).squeeze(1)

    def reached(self, passes: Tensor) -> Tensor:
        """Tokens that pass together with all tokens before them on their path: bool [B, k] to [B, k]."""
        if self.parents is None:
            return passes.long().cumprod(1).bool()
        follows, reached = pad(self.parents + 1, (1, 0)), pad(passes, (1, 0), value=True)  # [B, k + 1], by place
        for _ in range((follows.shape[1] - 1).bit_length()):  # twice as far back each time
            reached = reached & reached.gather(1, follows)
            follows = follows.gather(1, follows)
        return reached[:, 1:]

    def end(self, passes: Tensor) -> Tensor:
        """The place where the walk along tokens that pass (bool [B, k], at most one of siblings) ends: int64 [B]."""
        reached = self.reached(passes)
        if self.parents is None:
            return reached.long().sum(1)
        return (reached * torch.arange(1, reached.shape[1] + 1, device=reached.device)).amax(1)


@dataclass(frozen=True, slots=True, eq=False)
class Q:
    """The distributions the tokens of chains were drawn from, sparse: q is 0 off the tokens named."""

    #: int64 [B, k, K]; padding has probability 0.
    token_ids: Tensor
    #: float64 [B, k, K].
    probabilities: Tensor

    @classmethod
    def one_hot(cls, drafts: Drafts) -> Q:
        """q of a deterministic draft: it could propose only the token it proposed."""
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
    #: [B, k], for the draw at place i after a rejection there.
    residual: Tensor
    #: For the draw where no token was drafted: [B] in chains, after the last one; [B, k + 1] in trees, by place.
    bonus: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Siblings:
    """The drafted tokens of B trees by the place they may stand at, and the q they were drawn from."""

    #: int64 [B, k + 1, m]: tokens (their index in the tree) in the order in which they are tried; -1 where there are
    #: fewer.
    members: Tensor
    #: int64 [B, k + 1, K] and float64 [B, k + 1, K]: q of the first sibling. Without q that is 0 everywhere, and the
    #: ids are the siblings' own. Padding has id -1.
    token_ids: Tensor
    probabilities: Tensor

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        rows: Sequence[Sequence[SparseRow]],
        drafts: Drafts,
    ) -> Siblings:
        """``rows``: of each tree one per group of siblings, in the order of their first tokens, or none."""
        tried, both = cls.arrays(token_ids, parents, rows, drafts.rows.shape[1])
        device = drafts.token_ids.device
        return cls.packed(send(torch.from_numpy(tried), device), *send(torch.from_numpy(both), device).unbind())

    @classmethod
    def packed(cls, members: Tensor, token_ids: Tensor, weights: Tensor) -> Siblings:
        """From what :meth:`arrays` gives."""
        probabilities = weights.double()
        return cls(members, token_ids, probabilities / probabilities.sum(-1, keepdim=True).clamp_min_(1.0))

    @staticmethod
    def arrays(
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        rows: Sequence[Sequence[SparseRow]],
        num_places: int,
    ) -> tuple[sparse.Ids, sparse.Ids]:
        """Members int64 [B, places, m], and the ids and weights of q, int64 [2, B, places, K], K at least m."""
        num_rounds = len(token_ids)
        members: dict[tuple[int, int], list[int]] = {}
        q: dict[tuple[int, int], tuple[sparse.Ids, sparse.Ids]] = {}
        for b, follows in enumerate(parents):
            for i, (parent, number) in enumerate(zip(follows, trees.groups(follows), strict=True)):
                siblings = members.setdefault((b, parent + 1), [])
                siblings.append(i)
                if rows[b] and len(siblings) == 1:
                    q[b, parent + 1] = sparse.unpack(rows[b][number])
        most = max((len(group) for group in members.values()), default=1)
        width = max((len(named) for named, _ in q.values()), default=0)
        both = np.full((2, num_rounds, num_places, max(most, width)), -1, dtype=np.int64)
        both[1] = 0
        tried = np.full((num_rounds, num_places, most), -1, dtype=np.int64)
        for (b, place), group in members.items():
            tried[b, place, : len(group)] = group
            if (b, place) in q:
                named, weights = q[b, place]
                both[:, b, place, : len(named)] = named, weights
            else:
                both[0, b, place, : len(group)] = [token_ids[b][i] for i in group]
        return tried, both
