"""Goodness of fit of text generated with trees: as ``test_goodness_of_fit.py`` does for chains, with its target, its
drafts, its numbers of seeds and its statistics; real noise streams, real quantised q, several rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from engine.sampling.distribution import Distribution
from engine.sampling.drafting import draw_quantized, quantized
from engine.sampling.noise import Stream, uniform
from specdec import trees
from target_service.verification.rules import coupled, siblings
from target_service.verification.rules.drafts import Drafts, Siblings, Uniforms
from tests.target_service.verification.rules.test_goodness_of_fit import (
    CHUNK,
    LENGTH,
    LIMIT,
    V,
    chi_squared,
    head_of,
    keys,
    markov_logits,
)

#: Pairs of siblings after the root and after the first of them, a single child after the second.
PARENTS = (-1, -1, 0, 0, 1)
K = len(PARENTS)
DEPTHS = torch.tensor([0, *(depth + 1 for depth in trees.depths(PARENTS))])  # by place
FOLLOWS = torch.tensor(PARENTS) + 1


pytestmark = pytest.mark.usefixtures("one_thread")


def members_of(parents: Sequence[int]) -> Tensor:
    """[k + 1, 2]: the siblings at each place."""
    found = [[i for i, parent in enumerate(parents) if parent == place - 1] for place in range(len(parents) + 1)]
    return torch.tensor([[*group, *[-1] * (2 - len(group))] for group in found])


Verify = Callable[[Tensor, Drafts, Siblings, Uniforms], tuple[Tensor, Tensor]]


@dataclass
class Decoder:
    """Speculative decoding of many seeds at once with trees of one shape. Fields that tests replace plant bugs."""

    kind: str
    verify: Verify | None = siblings.verify  # None: coupled
    #: Siblings drawn from q; else the most likely tokens, of which the rule gets no q.
    is_drawn: bool = True
    replacing: bool = False
    accept_stream: Stream = Stream.ACCEPT
    residual_stream: Stream = Stream.RESIDUAL
    #: Whether the last token of a tree is verified, given the tree.
    keep_last: Callable[[Tensor], Tensor] | None = None
    sort: bool = False
    accepted: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        target, draft = markov_logits(self.kind)
        self.p = target.double().softmax(-1)  # [V, V]
        q = head_of(draft)
        weights = quantized(q)
        assert q.token_ids is not None
        self.weights = torch.zeros(V, V, dtype=torch.int64).scatter_(1, q.token_ids, weights)  # by token
        self.best = self.weights.topk(2, dim=-1).indices

    def run(self, trials: int) -> Tensor:
        """[trials, LENGTH] tokens, each trial its own seed, after a first token 0 at position 0."""
        return torch.cat([self._run(torch.arange(s, s + CHUNK)) for s in range(0, trials, CHUNK)])

    def _run(self, seeds: Tensor) -> Tensor:
        text = torch.zeros(len(seeds), LENGTH + 2 + K, dtype=torch.int64)
        done = torch.ones(len(seeds), dtype=torch.int64)
        while (active := (done <= LENGTH).nonzero().flatten()).numel():
            base = done[active]
            drafts = self._draft(seeds[active], base, text[active, base - 1])
            end, token_id = self._verify(seeds[active], base, drafts)
            depth = DEPTHS[end]
            self.accepted.append(depth)
            place = end.clone()
            text[active, base + depth] = token_id
            for _ in range(int(DEPTHS.max())):
                inner = (place > 0).nonzero().flatten()
                node = place[inner] - 1
                at = base[inner] + DEPTHS[place[inner]] - 1
                text[active[inner], at] = drafts.token_ids[inner, node]
                place[inner] = FOLLOWS[node]
            done[active] += depth + 1
        return text[:, 1 : LENGTH + 1]

    def _draft(self, seeds: Tensor, base: Tensor, last: Tensor) -> Drafts:
        rows = [last]  # by place: p given the token before it
        tokens: list[Tensor] = []
        for node, parent in enumerate(PARENTS):
            before = rows[parent + 1]
            earlier = [tokens[i] for i in range(node) if PARENTS[i] == parent]
            if not self.is_drawn:
                x = self.best[before, len(earlier)]
            else:
                weights = self.weights[before].clone()
                for y in earlier:
                    if not self.replacing:
                        weights.scatter_(1, y[:, None], 0)
                u = uniform(keys(seeds, Stream.DRAFT, base), torch.full_like(base, node))
                x = draw_quantized(weights, u[:, None])
            tokens.append(x)
            rows.append(x)
            if self.sort and node == 1:  # the likelier of the root's two is tried first
                p = self.p[last]
                swap = (p.gather(1, tokens[0][:, None]) < p.gather(1, x[:, None])).squeeze(1)
                tokens[:] = torch.where(swap, x, tokens[0]), torch.where(swap, tokens[0], x)
                rows[1:] = tokens
        ids = torch.stack(tokens, 1)
        lengths = torch.full_like(last, K)
        if self.keep_last is not None:
            lengths -= (~self.keep_last(ids)).long()
        rows = [last, *ids.unbind(1)]
        return Drafts(ids, lengths, torch.stack(rows, 1), torch.tensor(PARENTS).expand_as(ids).contiguous())

    def _verify(self, seeds: Tensor, base: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        if self.verify is None:
            rows = drafts.rows.flatten()
            key = keys(seeds[:, None], Stream.COUPLING, base[:, None] + DEPTHS).flatten()
            target = Distribution(self.p[rows], None, torch.ones(len(rows), dtype=torch.bool), V)
            return coupled.verify(target, replace(drafts, rows=torch.arange(len(rows)).reshape(-1, K + 1)), key)
        places = torch.arange(K).expand(len(base), K)
        accept = uniform(keys(seeds[:, None], self.accept_stream, base[:, None]), places)
        residual = uniform(keys(seeds[:, None], self.residual_stream, base[:, None]), places)
        bonus = uniform(keys(seeds[:, None], Stream.BONUS, base[:, None] + DEPTHS), torch.tensor(0))
        members = members_of(PARENTS).expand(len(base), K + 1, 2).contiguous()
        members = torch.where(members < drafts.lengths[:, None, None], members, -1)
        if self.is_drawn:
            q = self.weights[drafts.rows].double() * (members >= 0).any(-1, keepdim=True)
            ids = torch.where(q > 0, torch.arange(V), -1)
            q = q / q.sum(-1, keepdim=True).clamp_min(1)
        else:
            ids = drafts.token_ids.gather(1, members.clamp_min(0).flatten(1)).view(members.shape)
            ids, q = torch.where(members >= 0, ids, -1), torch.zeros(members.shape, dtype=torch.float64)
        return self.verify(self.p, drafts, Siblings(members, ids, q), Uniforms(accept, residual, bonus))


CASES = {
    f"{name}, {kind}": Decoder(kind, **how)
    for kind in ("adversarial", "aligned", "peaked")
    for name, how in {
        "drawn": {},
        "chosen": {"is_drawn": False},
        "coupled": {"verify": None, "is_drawn": False},
    }.items()
}


#: Drafts of every kind once, and drawn trees twice; the exhaustive run takes all.
SOME = ("drawn, aligned", "drawn, peaked", "chosen, adversarial", "coupled, aligned")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in CASES]
)
def test_the_text_has_the_targets_distribution(name: str, trials: int) -> None:
    decoder = CASES[name]
    assert chi_squared(decoder.run(trials), decoder.p) > LIMIT


def test_a_last_token_may_be_cut_off_for_what_stands_before_it(trials: int) -> None:
    decoder = Decoder("aligned", keep_last=lambda ids: ids[:, 0] % 3 != 0)
    assert chi_squared(decoder.run(trials), decoder.p) > LIMIT


def test_of_a_tree_without_q_any_part_may_be_verified(trials: int) -> None:
    decoder = Decoder("aligned", is_drawn=False, keep_last=lambda ids: ids[:, -1] % 3 != 0)
    assert chi_squared(decoder.run(trials), decoder.p) > LIMIT


BUGS = {
    "siblings drawn with replacement": Decoder("peaked", replacing=True),
    "one stream for draft and acceptance": Decoder("aligned", accept_stream=Stream.DRAFT),
    "one stream for acceptance and residual": Decoder("aligned", residual_stream=Stream.ACCEPT),
    "siblings sorted after they were drawn": Decoder("aligned", sort=True),
    "a token cut off for what it is": Decoder("aligned", keep_last=lambda ids: ids[:, -1] % 3 != 0),
}


#: Their streams are those of the chain's bugs.
REST = ("one stream for acceptance and residual", "siblings sorted after they were drawn")


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=pytest.mark.exhaustive if bug in REST else ()) for bug in BUGS]
)
def test_planted_bugs_are_refused(bug: str, trials: int) -> None:
    decoder = BUGS[bug]
    assert chi_squared(decoder.run(trials), decoder.p) < LIMIT / 1e4
