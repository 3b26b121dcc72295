"""Cutting a chain before it is verified: exact where the cut does not depend on what it cuts, biased where it does.

The joint distribution of the next k + 1 tokens is enumerated as in :mod:`test_exact`, with the length of every chain
given by a function of its tokens. The target's budget knows statistics of past rounds alone, so its cuts are constants
here (and any mixture of them). A cut by the tokens before position j would be exact, too; one by token j is the planted
bug, and the same check refuses it. A grammar cuts behind the first token that it forbids: p is 0 from there on. Cutting
that token as well is biased where it was drawn from q. Tokens that a grammar forces take the place of drawn ones, and
what was drawn behind them stays where the same tokens were drawn. Their q is one-hot; to keep q where the draft has
drawn them is the planted bug.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch.nn.functional import one_hot

from target_service.verification.rules.drafts import Drafts, Q
from target_service.verification.rules.residual import residual
from tests.target_service.verification.rules.test_exact import (
    F64,
    LAWS,
    Acceptance,
    World,
    completed,
    target_joint,
    world,
)

Truncation = Callable[[World, tuple[int, ...]], int]


def error(w: World, law: Acceptance, cut: Truncation, forced: tuple[int, ...] = (), *, keeps_q: bool = False) -> float:
    """Distance of the verified output from the target's, all chains of k tokens drawn from q, then cut; ``forced``
    tokens take the place of the first ones.
    """
    chains = list(product(range(w.num_tokens), repeat=w.k))
    count = len(forced)
    fed = [(*forced, *x[count : cut(w, x)]) if x[:count] == forced else forced for x in chains]
    lengths = [len(y) for y in fed]
    tokens = torch.tensor([[*y, *[0] * (w.k - len(y))] for y in fed])
    rows = torch.tensor([[w.prefixes[y[: min(j, len(y))]] for j in range(w.k + 1)] for y in fed])
    drafts = Drafts(tokens, torch.tensor(lengths), rows)
    ids = torch.arange(w.num_tokens).expand(len(chains), w.k, -1)
    weights = w.q[rows[:, :-1]]
    drawn = torch.tensor([keeps_q and x[:count] == forced for x in chains])[:, None, None]
    weights[:, :count] = torch.where(drawn, weights[:, :count], one_hot(tokens[:, :count], w.num_tokens).to(F64))
    q = Q(ids, weights * drafts.present[..., None])
    weight = torch.ones(len(chains), dtype=F64)
    for i in range(w.k):
        weight *= torch.stack([w.q[w.prefixes[x[:i]], x[i]] for x in chains])
    law_, scale = law(w.p, drafts, q)
    joint = target_joint(w)
    out = torch.zeros_like(joint)
    for tau in range(w.k + 1):
        reached = torch.tensor([n >= tau for n in lengths])
        accepted = torch.minimum(torch.full_like(drafts.lengths, tau), drafts.lengths)
        left = residual(w.p, drafts, q, accepted, scale[:, tau])
        share = weight * law_[:, tau] * reached
        mass = share[:, None] * left / left.sum(-1, keepdim=True).clamp_min(1e-300)
        out += completed(w, joint, drafts.token_ids[:, :tau], mass)
    return float((out - joint).abs().sum())


def after_one(w: World, x: tuple[int, ...]) -> int:
    return 1


def after_two(w: World, x: tuple[int, ...]) -> int:
    return 2


def by_the_tokens_before(w: World, x: tuple[int, ...]) -> int:
    """Position j goes where token j - 1 is an even one."""
    return next((j for j in range(1, w.k) if x[j - 1] % 2 == 0), w.k)


def by_its_own_probability(w: World, x: tuple[int, ...]) -> int:
    """The planted bug: a token that the draft held unlikely is not verified."""
    return next((j for j in range(w.k) if float(w.q[w.prefixes[x[:j]], x[j]]) < 0.3), w.k)


def behind_the_first_forbidden(w: World, x: tuple[int, ...]) -> int:
    """As ``Grammar.num_kept`` cuts chains that were drawn from q."""
    return next((j + 1 for j in range(w.k) if float(w.p[w.prefixes[x[:j]], x[j]]) == 0), w.k)


def before_the_first_forbidden(w: World, x: tuple[int, ...]) -> int:
    """The planted bug: what the rule would have rejected is not verified."""
    return next((j for j in range(w.k) if float(w.p[w.prefixes[x[:j]], x[j]]) == 0), w.k)


@pytest.mark.parametrize("cut", [after_one, after_two, by_the_tokens_before])
@pytest.mark.parametrize("kind", ["random", "adversarial", "aligned"])
@pytest.mark.parametrize("rule", LAWS)
def test_a_cut_that_does_not_look_is_exact(rule: str, kind: str, cut: Truncation) -> None:
    for seed in range(3):
        assert error(world(3, 3, seed, kind), LAWS[rule], cut) < 1e-12


@pytest.mark.parametrize("rule", LAWS)
def test_a_cut_by_the_token_itself_is_refused(rule: str) -> None:
    assert max(error(world(3, 3, seed, "random"), LAWS[rule], by_its_own_probability) for seed in range(3)) > 1e-2


@pytest.mark.parametrize("rule", LAWS)
def test_a_grammars_cut_is_exact(rule: str) -> None:
    for seed in range(6):
        assert error(world(3, 3, seed, "sparse"), LAWS[rule], behind_the_first_forbidden) < 1e-12


@pytest.mark.parametrize("rule", LAWS)
def test_a_cut_of_the_forbidden_token_is_refused(rule: str) -> None:
    assert max(error(world(3, 3, s, "sparse"), LAWS[rule], before_the_first_forbidden) for s in range(6)) > 1e-2


@pytest.mark.parametrize("forced", [(0,), (2, 1), (1, 1, 0)])
@pytest.mark.parametrize("kind", ["random", "adversarial", "aligned", "sparse"])
@pytest.mark.parametrize("rule", LAWS)
def test_forced_tokens_are_exact(rule: str, kind: str, forced: tuple[int, ...]) -> None:
    for seed in range(3):
        assert error(world(3, 3, seed, kind), LAWS[rule], lambda w, _: w.k, forced) < 1e-12


@pytest.mark.parametrize("rule", LAWS)
def test_forced_tokens_with_the_q_of_drawn_ones_are_refused(rule: str) -> None:
    worlds = [world(3, 3, seed, "random") for seed in range(3)]
    assert max(error(w, LAWS[rule], lambda w, _: w.k, (0, 1), keeps_q=True) for w in worlds) > 1e-2
