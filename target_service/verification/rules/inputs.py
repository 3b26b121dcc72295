"""What a rule is given: rounds of one kind, the target's distributions of their rows, and their sessions' noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.distribution import Distribution
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.transfer import send
from target_service.verification.rounds import Round
from target_service.verification.rules.drafts import Drafts, Q, Siblings, Uniforms


@dataclass(frozen=True, slots=True, eq=False)
class RuleInput:
    """B rounds with a temperature above 0, all chains or all trees, and their R rows, one round after the other."""

    rounds: Sequence[Round]
    drafts: Drafts
    rows: Rows
    #: p of every row, after all transforms.
    target: Distribution

    @property
    def are_trees(self) -> bool:
        """Whether the rounds are trees."""
        return self.drafts.parents is not None

    def q(self) -> Q:
        """The distributions the tokens of chains were drawn from."""
        return Q.sparse([r.q_rows for r in self.rounds], self.drafts)

    def siblings(self) -> Siblings:
        """The drafted tokens of trees by place, and the distributions they were drawn from."""
        return Siblings.of(
            [r.draft_token_ids for r in self.rounds],
            [r.parents for r in self.rounds],
            [r.q_rows for r in self.rounds],
            self.drafts,
        )

    def noise_keys(self, stream: Stream) -> Tensor:
        """Keys of the sessions' noise at the position of each row's token: int64 [R]."""
        positions = zip(self.rows.states, self.rows.positions, strict=True)
        keys = [state.noise_key(stream, position) for state, position in positions]
        return send(keys, self._device)

    def uniforms(self) -> Uniforms:
        """The sessions' uniform numbers: :func:`uniforms_of`."""
        k = self.drafts.token_ids.shape[1]
        u = [uniforms_of(r, k) for r in self.rounds]
        numbers = send(u, self._device, torch.float64)  # [B, 2 k + 1], of trees [B, 3 k + 1]
        bonus = numbers[:, 2 * k :] if self.are_trees else numbers[:, 2 * k]
        return Uniforms(numbers[:, :k], numbers[:, k : 2 * k], bonus)

    @property
    def _device(self) -> torch.device:
        return self.drafts.token_ids.device


def uniforms_of(r: Round, num_tokens: int) -> list[float]:
    """A session's uniform numbers for acceptance, for residuals and for the bonus draw, padded to ``num_tokens``.

    Those for acceptance and residuals are keyed by where the round starts, and so never serve two rounds. A position
    that is drafted again after a rejection must not meet its old numbers: block verification has looked at them to
    decide where the round ended.
    """
    state, k = r.state, num_tokens
    by_place = _bonus_by_place(r, k) if r.parents else state.uniforms(Stream.BONUS, len(state) + len(r.draft_token_ids))
    return [
        *state.uniforms(Stream.ACCEPT, len(state), range(k)),
        *state.uniforms(Stream.RESIDUAL, len(state), range(k)),
        *by_place,
    ]


def _bonus_by_place(r: Round, num_tokens: int) -> list[float]:
    """Numbers of the bonus draw of each place of a tree, keyed by where the token stands; padded to ``num_tokens``."""
    count = len(r.draft_token_ids)
    counts = [len(r.path_to(place)) for place in range(count + 1)]
    by_count = [r.state.uniforms(Stream.BONUS, len(r.state) + n)[0] for n in range(max(counts) + 1)]
    return [*(by_count[n] for n in counts), *[0.5] * (num_tokens - count)]
