"""Rows: the places of a batch where a token is drawn, each a session and the uncommitted tokens after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.state import SamplingState
from engine.sampling.transfer import send
from specdec.trees import path_to


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """R places of a batch; row r of the logits decides the token after ``states[r]`` and its prefix.

    The prefix has drafted tokens.
    """

    #: One per row; rows of one session share the object.
    states: Sequence[SamplingState]
    #: int64 [R, m] on the logits' device, aligned left; entries from prefix_lens[r] on mean nothing.
    prefix: Tensor
    prefix_lens: Sequence[int]

    @classmethod
    def after(cls, states: Sequence[SamplingState]) -> Rows:
        """One row per state, after its committed tokens."""
        prefix = torch.zeros(len(states), 0, dtype=torch.int64)
        return cls(states, send(prefix, states[0].device) if states else prefix, [0] * len(states))

    @classmethod
    def along(
        cls,
        states: Sequence[SamplingState],
        token_ids: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Rows:
        """k + 1 rows per state: after its committed tokens, then after the path to each of its drafted tokens.

        ``parents`` are those of trees of drafted tokens; None, or an empty entry, means a chain.
        """
        places: list[tuple[SamplingState, Sequence[int], int]] = []  # a path, and how much of it
        for i, (state, ids) in enumerate(zip(states, token_ids, strict=True)):
            if follows := parents[i] if parents else ():
                paths = [path_to(follows, node) for node in range(-1, len(ids))]
                places += [(state, [ids[node] for node in path], len(path)) for path in paths]
            else:
                places += [(state, ids, n) for n in range(len(ids) + 1)]
        edits = any(state.edits for state in states)  # nothing else reads prefixes
        width = max(len(ids) for _, ids, _ in places) if edits and places else 0
        prefix = torch.zeros(len(places), 0, dtype=torch.int64)
        if width:
            prefix = torch.tensor([[*ids, *[0] * (width - len(ids))] for _, ids, _ in places])
        return cls(
            [state for state, _, _ in places],
            send(prefix, states[0].device) if states else prefix,
            [n for _, _, n in places],
        )

    def __len__(self) -> int:
        return len(self.states)

    @property
    def positions(self) -> list[int]:
        """Where the token of each row will stand in its sequence."""
        return [len(state) + n for state, n in zip(self.states, self.prefix_lens, strict=True)]

    @property
    def bases(self) -> list[int]:
        """Where the drafted tokens of each row start: the committed length at which they will be verified."""
        return [len(state) for state in self.states]

    def extended(self, token_ids: Tensor) -> Rows:
        """The rows one drafted token further: ``token_ids`` int64 [R]. Nothing leaves the device."""
        lens = [n + 1 for n in self.prefix_lens]
        if not lens or min(lens) == max(lens) == self.prefix.shape[1] + 1:
            prefix = torch.cat([self.prefix, token_ids[:, None]], dim=1)
        else:
            width = max(*lens, self.prefix.shape[1])
            prefix = self.prefix.new_zeros(len(self), width)
            prefix[:, : self.prefix.shape[1]] = self.prefix
            at = send(self.prefix_lens, prefix.device)
            prefix.scatter_(1, at[:, None], token_ids[:, None])
        return Rows(self.states, prefix, lens)

    def select(self, indices: Sequence[int]) -> Rows:
        """Some of the rows, in the order given."""
        at = send(indices, self.prefix.device, torch.int64)
        return Rows(
            [self.states[i] for i in indices],
            self.prefix.index_select(0, at),
            [self.prefix_lens[i] for i in indices],
        )

    def tails(self, width: int) -> Tensor:
        """The last ``width`` tokens before each row, prefix included: int64 [R, width]; -2 where there are fewer."""
        committed = [([-2] * width + state.token_ids[-width:])[-width:] for state in self.states]
        context = torch.cat([send(committed, self.prefix.device), self.prefix], dim=1)  # [R, width + m]
        first = send(self.prefix_lens, self.prefix.device)[:, None]
        return context.gather(1, first + torch.arange(width, device=self.prefix.device))
