"""Verification with tensors, on any device: rounds of one kind are decided together, with one transfer to the host.

On a GPU :mod:`target_service.verification.captured` decides what it knows of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.sampling.distribution import MAX_NUMBERS, distribution
from engine.sampling.edits import edited
from engine.sampling.rows import Rows
from engine.sampling.transfer import send
from specdec.rules import Rule
from specdec.trees import depths
from target_service.verification.captured import WALK, GpuVerdicts, Kind
from target_service.verification.logprobs import read, score
from target_service.verification.rounds import Outcome, Round
from target_service.verification.rules import greedy
from target_service.verification.rules.drafts import Drafts
from target_service.verification.rules.inputs import RuleInput
from target_service.verification.rules.registry import VERIFY


def verify_with_tensors(
    logits: Tensor, rounds: Sequence[Round], *, exact: bool = False, on_gpu: GpuVerdicts | None = None
) -> list[Outcome]:
    """:meth:`Verifier.verify <target_service.verification.verifier.Verifier.verify>` on any device.

    ``on_gpu`` decides what it knows. Unless it is ``exact``, rounds whose distributions turn out to lack tokens are
    decided once more, exactly.
    """
    of_kind: dict[tuple[Kind | None, object], list[int]] = {}
    for i, r in enumerate(rounds):
        known = None if on_gpu is None or exact else on_gpu.kind(r)
        of_kind.setdefault((known, _kind(r) if known is None else None), []).append(i)
    together = [
        (known, part)
        for (known, _), indices in of_kind.items()
        for part in ([indices] if known == WALK else _cut(indices, rounds, logits.shape[1]))
    ]
    groups = [_Group([rounds[i] for i in part], logits.device, exact, known, on_gpu) for known, part in together]
    values = [part for group in groups for part in group.decide(logits)]
    host = (torch.cat(values) if len(values) > 1 else values[0]).tolist()

    outcomes: list[Outcome | None] = [None] * len(rounds)
    at = 0
    for group, (_, indices) in zip(groups, together, strict=True):
        for i, outcome in zip(indices, group.read(host[at : at + group.num_values], logits), strict=True):
            outcomes[i] = outcome
        at += group.num_values
    if open_ones := [i for i, outcome in enumerate(outcomes) if outcome is None]:
        again = verify_with_tensors(logits, [rounds[i] for i in open_ones], exact=True)
        for i, outcome in zip(open_ones, again, strict=True):
            outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _cut(indices: Sequence[int], rounds: Sequence[Round], num_tokens: int) -> Iterator[list[int]]:
    """Rounds of one kind, in parts of at most :data:`MAX_NUMBERS` logits."""
    part: list[int] = []
    num_rows = 0
    for i in indices:
        own = len(rounds[i].draft_token_ids) + 1
        if part and (num_rows + own) * num_tokens > MAX_NUMBERS:
            yield part
            part, num_rows = [], 0
        part.append(i)
        num_rows += own
    yield part


def _kind(r: Round) -> tuple[Rule | None, bool, bool]:
    """Rounds of one kind are decided together: greedy ones, or those of one rule that all truncate or all do not. Trees
    are separate from chains.
    """
    is_tree = len(r.parents) > 0
    return (None, False, is_tree) if r.state.params.greedy else (r.rule, r.state.truncates, is_tree)


@dataclass(frozen=True, eq=False)
class _Group:
    """Rounds of one kind and their rows, one after the other."""

    rounds: Sequence[Round]
    device: torch.device
    #: Whether no distribution may lack tokens.
    exact: bool
    #: Their kind, and what decides them in place of tensors.
    known: Kind | None = None
    on_gpu: GpuVerdicts | None = None

    @cached_property
    def drafts(self) -> Drafts:
        """The drafted tokens of the rounds."""
        token_ids = [r.draft_token_ids for r in self.rounds]
        if not any(r.parents for r in self.rounds):
            return Drafts.chains(token_ids, self.device)
        return Drafts.trees(token_ids, [r.follows for r in self.rounds], self.device)

    @cached_property
    def rows(self) -> Rows:
        """The rounds' rows."""
        token_ids, parents = [r.draft_token_ids for r in self.rounds], [r.parents for r in self.rounds]
        return Rows.along([r.state for r in self.rounds], token_ids, parents)

    @property
    def logit_rows(self) -> Sequence[int]:
        """For each row of the group its row in the step's logits."""
        return [r.start_row + i for r in self.rounds for i in range(len(r.draft_token_ids) + 1)]

    # --- on the device ---

    def decide(self, logits: Tensor) -> list[Tensor]:
        """All that must reach the host, flat float64: ends, next tokens, whether they are valid (-1: not known), and
        log-probabilities.
        """
        if self.on_gpu is not None and self.known is not None:
            decided = self.on_gpu.decide(self.known, logits, self.rounds)
            if decided is not None:
                scored = [self._score(logits, *decided[:2].long()).flatten()] if self._scored_rounds else []
                return [decided.flatten(), *scored]
        end, next_token, valid, complete = self._apply_rule(
            self._masked(edited(_pick(logits, self.logit_rows), self.rows), logits)
        )
        decided_here = valid[self.drafts.row_at(end)].double()
        if complete is not None:
            decided_here = torch.where(complete[self.drafts.rows].all(1), decided_here, -1.0)
        values = [end.double(), next_token.double(), decided_here]
        if self._scored_rounds:
            values.append(self._score(logits, end, next_token).flatten())
        return values

    def _apply_rule(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Edited logits [r, V] to (the places where walks end [B], next token [B], valid [r], complete [r])."""
        if self.rounds[0].state.params.greedy:
            return *greedy.verify(logits, self.drafts), None
        target = distribution(logits, self.rows, exact=self.exact)
        verify = VERIFY[self.rounds[0].rule]
        return *verify(RuleInput(self.rounds, self.drafts, self.rows, target)), target.valid, target.complete

    def _masked(self, edits: Tensor, logits: Tensor) -> Tensor:
        """Edited logits [r, V], -inf where a round's masks forbid the token. The step's ``logits`` are not changed."""
        masks = [r.masks for r in self.rounds if r.masks is not None]
        if not masks:
            return edits
        words = send(torch.cat(masks), edits.device)
        forbidden = ((words.view(torch.uint8)[..., None] & _bits(edits.device)) == 0).flatten(1)[:, : edits.shape[1]]
        if len(forbidden) == len(edits):
            return edits.masked_fill(forbidden, -torch.inf)
        if edits.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr():
            edits = edits.clone()
        is_masked = [r.masks is not None for r in self.rounds for _ in range(len(r.draft_token_ids) + 1)]
        at = send([row for row, masked in enumerate(is_masked) if masked], edits.device)
        edits[at] = edits[at].masked_fill(forbidden, -torch.inf)
        return edits

    # --- log-probabilities ---

    @property
    def _scored_rounds(self) -> list[int]:
        return [b for b, r in enumerate(self.rounds) if r.logprobs is not None]

    @property
    def _num_top(self) -> int:
        return max(min(r.logprobs or 0, r.state.num_tokens) for r in self.rounds)

    def _score(self, logits: Tensor, end: Tensor, next_token: Tensor) -> Tensor:
        """Packed log-probabilities of all rows of the rounds that ask; rows off the accepted path mean nothing."""
        padded = torch.cat([self.drafts.token_ids, next_token[:, None]], dim=1)  # [B, k + 1], by place
        if self.drafts.parents is not None:
            padded = self._following(end)
        padded.scatter_(1, end[:, None], next_token[:, None])
        at = [(b, i) for b in self._scored_rounds for i in range(len(self.rounds[b].draft_token_ids) + 1)]
        b, i = send(at, logits.device).unbind(1)
        picked = logits[send([self.rounds[b].start_row + i for b, i in at], logits.device)]
        return score(picked, padded[b, i], self._num_top, self.rounds[0].state.num_tokens)

    def _following(self, end: Tensor) -> Tensor:
        """The drafted token after each place of the path to ``end``: int64 [B, k + 1]; others mean nothing."""
        assert self.drafts.parents is not None
        before = pad(self.drafts.parents + 1, (1, 0))  # [B, k + 1], the place before each
        drafted = pad(self.drafts.token_ids, (1, 1))
        place, spare = end[:, None], before.shape[1]
        following = torch.zeros_like(drafted)
        for _ in range(max(max(depths(r.follows), default=0) for r in self.rounds) + 1):
            previous = before.gather(1, place)
            following.scatter_(1, torch.where(place > 0, previous, spare), drafted.gather(1, place))
            place = previous
        return following[:, :-1]

    # --- on the host ---

    @property
    def num_values(self) -> int:
        """How many numbers :meth:`decide` sends."""
        num_rows = sum(len(self.rounds[b].draft_token_ids) + 1 for b in self._scored_rounds)
        return 3 * len(self.rounds) + (2 + 2 * self._num_top) * num_rows

    def read(self, values: Sequence[float], logits: Tensor) -> list[Outcome | None]:
        """The outcomes in the group's order, None where it is not known. ``logits`` are looked at only to explain a
        failure.
        """
        count = len(self.rounds)
        outcomes: list[Outcome | None] = []
        scored = np.asarray(values[3 * count :], np.float64).reshape(-1, 2 + 2 * self._num_top)
        at = 0
        for b, r in enumerate(self.rounds):
            end = int(values[b])
            is_valid = bool(values[2 * count + b])
            outcome = r.outcome(end, int(values[count + b])) if is_valid else r.failure(end, logits)
            if r.logprobs is not None:
                token_ids = outcome.token_ids
                rows = [at, *(at + i + 1 for i in outcome.path)][: len(token_ids)]
                logprobs = read(scored[rows], token_ids, [r.logprobs] * len(token_ids))
                outcome = replace(outcome, logprobs=tuple(logprobs))
                at += len(r.draft_token_ids) + 1
            outcomes.append(None if values[2 * count + b] < 0 else outcome)
        return outcomes


def _pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of the logits; the logits themselves where that is all of them in order."""
    if len(rows) == logits.shape[0] and all(i == row for i, row in enumerate(rows)):
        return logits
    return logits.index_select(0, send(rows, logits.device))


@cache
def _bits(device: torch.device) -> Tensor:
    """The bits of a byte, lowest first: uint8 [8]."""
    return send([1 << bit for bit in range(8)], device, torch.uint8)
