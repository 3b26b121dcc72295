"""Losslessness of the ratio rules by exact enumeration: every draft, every acceptance, every residual, summed up.

For a target and a draft with arbitrary conditional distributions the joint distribution of the next k + 1 tokens is
computed from the rules' own acceptance probabilities and residuals and compared with the target's, to 1e-12.
Each planted bug runs through the same check and must fail it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from target_service.verification.rules import block, token
from target_service.verification.rules.drafts import Drafts, Q
from target_service.verification.rules.residual import residual

F64 = torch.float64


@dataclass(frozen=True)
class World:
    """Target p and draft q given every prefix of up to k tokens; prefixes are numbered in the order of `prefixes`."""

    k: int
    prefixes: dict[tuple[int, ...], int]
    p: Tensor  # [prefixes, V]
    q: Tensor  # [prefixes, V]

    @property
    def num_tokens(self) -> int:
        return self.p.shape[1]

    @property
    def text(self) -> Tensor:
        """p, but token 0 for ever where the text has ended."""
        return ended(self.p)


def ended(p: Tensor) -> Tensor:
    """Rows of p, those that allow no token with token 0: plain decoding does not reach them."""
    has_tokens = p.sum(-1, keepdim=True) > 0  # nor has a row of NaN
    return torch.where(has_tokens, p, torch.arange(p.shape[1]) == 0)


def world(num_tokens: int, k: int, seed: int, kind: str = "random") -> World:
    g = torch.Generator().manual_seed(seed)
    prefixes = {x: i for i, x in enumerate(x for n in range(k + 1) for x in product(range(num_tokens), repeat=n))}
    logits = torch.randn(len(prefixes), num_tokens, generator=g, dtype=F64) * 2
    p = logits.softmax(-1)
    match kind:
        case "random":
            q = (torch.randn(logits.shape, generator=g, dtype=F64) * 2).softmax(-1)
        case "adversarial":
            q = (-logits).softmax(-1)
        case "aligned":
            q = (logits + 0.5 * torch.randn(logits.shape, generator=g, dtype=F64)).softmax(-1)
        case "equal":
            q = p.clone()
        case "sparse":  # both have zeros, in different places
            p = p * (torch.rand(p.shape, generator=g) < 0.7)
            p[:, 0] += 0.1
            q = (-logits).softmax(-1) * (torch.rand(p.shape, generator=g) < 0.6)
            q[:, -1] += 0.1
            p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        case "ending":  # no token may follow token 0, which ends the text; the draft does not know
            q = (logits + 0.5 * torch.randn(logits.shape, generator=g, dtype=F64)).softmax(-1)
            p[[i for x, i in prefixes.items() if 0 in x]] = 0
        case "marginals":  # what one pass drafts: a row depends on its place alone
            by_length = (torch.randn(k + 1, num_tokens, generator=g, dtype=F64) * 2).softmax(-1)
            q = by_length[[len(x) for x in prefixes]]
        case "one-hot":
            q = torch.zeros_like(p)
            q[torch.arange(len(q)), torch.randint(num_tokens, (len(q),), generator=g)] = 1
    return World(k, prefixes, p, q)


def target_joint(w: World) -> Tensor:
    """Joint distribution of k + 1 tokens under the target: [V] * (k + 1)."""
    joint = torch.ones((), dtype=F64)
    for n in range(w.k + 1):
        rows = [w.prefixes[x] for x in product(range(w.num_tokens), repeat=n)]
        joint = joint[..., None] * w.text[rows].reshape(*[w.num_tokens] * (n + 1))
    return joint


def completed(w: World, joint: Tensor, accepted: Tensor, mass: Tensor) -> Tensor:
    """Probabilities of texts [V] * (k + 1) that begin with ``accepted`` [B, tau] and a token of ``mass`` [B, V]; the
    target, whose ``joint`` is given, writes the rest.
    """
    tau = accepted.shape[1]
    heads = torch.zeros([w.num_tokens] * (tau + 1), dtype=F64)
    for x, row in zip(accepted.tolist(), mass, strict=True):
        heads[tuple(x)] += row
    marginal = joint.flatten(tau + 1).sum(-1) if tau < w.k else joint
    tail = joint / marginal.reshape(*marginal.shape, *[1] * (w.k - tau)).clamp_min(1e-300)
    return heads.reshape(*heads.shape, *[1] * (w.k - tau)) * tail


def drafts_of(w: World, length: int) -> tuple[Drafts, Q, Tensor]:
    """All chains of a length, padded to k; q with shuffled, padded supports; each chain's probability."""
    chains = list(product(range(w.num_tokens), repeat=length))
    padded = torch.tensor([[*x, *[0] * (w.k - length)] for x in chains]).reshape(len(chains), w.k)
    rows = torch.tensor([[w.prefixes[x[: min(n, length)]] for n in range(w.k + 1)] for x in chains])
    drafts = Drafts(padded, torch.full((len(chains),), length), rows)
    order = torch.randperm(w.num_tokens, generator=torch.Generator().manual_seed(0))
    probs = w.q[rows[:, :-1]][..., order] * drafts.present[..., None]
    ids = order.expand_as(probs) * (probs > 0)  # padding names token 0
    q = Q(torch.cat([ids, torch.zeros_like(ids)], -1), torch.cat([probs, torch.zeros_like(probs)], -1))
    weight = torch.ones(len(chains), dtype=F64)
    for i in range(length):
        weight = weight * w.q[rows[:, i], padded[:, i]]
    return drafts, q, weight


Acceptance = Callable[[Tensor, Drafts, Q], tuple[Tensor, Tensor]]


def token_law(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    """Pr[tau = i] and the residual's scale, both [B, k + 1], under the token rule."""
    a = token.acceptance(p, drafts, q).clamp_max(1) * drafts.present
    ones = torch.ones_like(a[:, :1])
    reach = torch.cat([ones, a.cumprod(1)], 1)
    return reach * (1 - torch.cat([a, 0 * ones], 1)), torch.ones_like(reach)


def block_law(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    """The same under the block rule: the last success counts."""
    return _block_law(*block.acceptance(p, drafts, q), drafts)


def _block_law(share: Tensor, h: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    h = h * drafts.present
    ones = torch.ones_like(h[:, :1])
    miss_later = torch.cat([(1 - h).flip(1).cumprod(1).flip(1), ones], 1)  # no success after i
    return torch.cat([ones, h], 1) * miss_later, share


LAWS = {"token": token_law, "block": block_law}


def output_joint(
    w: World, law: Acceptance, length: int, rest: Callable[..., Tensor] = residual, *, fails: bool = False
) -> tuple[Tensor, float]:
    """Joint distribution of k + 1 tokens of verified output (continued by p), and expected accepted tokens."""
    drafts, q, weight = drafts_of(w, length)
    law_, scale = law(w.p, drafts, q)
    out = torch.zeros([w.num_tokens] * (w.k + 1), dtype=F64)
    joint = target_joint(w)
    expected = 0.0
    for tau in range(length + 1):
        accepted = torch.full_like(drafts.lengths, tau)
        left = rest(w.p, drafts, q, accepted, scale[:, tau])
        drawn = left / left.sum(-1, keepdim=True)
        mass = (weight * law_[:, tau])[:, None] * (drawn.nan_to_num(0) if fails else ended(drawn))  # [B, V]
        expected += tau * float((weight * law_[:, tau]).sum())
        out += completed(w, joint, drafts.token_ids[:, :tau], mass)
    return out, expected


def error(
    w: World, law: Acceptance, length: int, rest: Callable[..., Tensor] = residual, *, fails: bool = False
) -> float:
    return float((output_joint(w, law, length, rest, fails=fails)[0] - target_joint(w)).abs().sum())


KINDS = ["random", "adversarial", "aligned", "equal", "sparse", "marginals", "one-hot", "ending"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", LAWS)
def test_the_joint_distribution_is_the_targets(rule: str, kind: str) -> None:
    for seed, (num_tokens, k) in enumerate([(2, 4), (3, 3), (4, 2), (5, 1)] * 2):
        w = world(num_tokens, k, seed, kind)
        for length in range(k + 1):  # shorter than k: ragged padding
            assert error(w, LAWS[rule], length) < 1e-12


@pytest.mark.parametrize("rule", LAWS)
def test_logits_that_are_not_finite_after_the_end_do_not_matter(rule: str) -> None:
    for seed in range(3):
        w = world(3, 3, seed, "ending")
        assert error(replace(w, p=torch.where(w.p.sum(-1, True) > 0, w.p, torch.nan)), LAWS[rule], 3) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_at_least_as_much_as_token(kind: str) -> None:
    gains = []
    for seed in range(12):
        w = world(3, 3, seed, kind)
        gains.append(output_joint(w, block_law, 3)[1] - output_joint(w, token_law, 3)[1])
    assert min(gains) > -1e-12
    if kind in ("random", "adversarial", "aligned"):
        assert max(gains) > 1e-3
    if kind == "one-hot":  # block without q is token without q
        assert max(gains) < 1e-12


def test_the_papers_example() -> None:
    """Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 tokens accepted, 11/9 by block."""
    w = world(2, 2, 0)
    w = World(2, w.prefixes, torch.tensor([1, 2]).expand(7, 2) / 3.0, torch.tensor([2, 1]).expand(7, 2) / 3.0)
    w = World(2, w.prefixes, w.p.double() / w.p.double().sum(-1, True), w.q.double() / w.q.double().sum(-1, True))
    assert output_joint(w, token_law, 2)[1] == pytest.approx(10 / 9, abs=1e-7)
    assert output_joint(w, block_law, 2)[1] == pytest.approx(11 / 9, abs=1e-7)


def test_token_acceptance_is_the_overlap_of_p_and_q() -> None:
    w = world(5, 1, 3)
    assert output_joint(w, token_law, 1)[1] == pytest.approx(float(torch.minimum(w.p[0], w.q[0]).sum()), abs=1e-12)


# --- planted bugs: the same check must refuse each ---


def ratio_inverted(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    a = (1 / token.acceptance(p, drafts, q)).clamp_max(1) * drafts.present
    ones = torch.ones_like(a[:, :1])
    reach = torch.cat([ones, a.cumprod(1)], 1)
    return reach * (1 - torch.cat([a, 0 * ones], 1)), torch.ones_like(reach)


def block_stopping_at_the_first_miss(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    share, h = block.acceptance(p, drafts, q)
    ones = torch.ones_like(h[:, :1])
    reach = torch.cat([ones, (h * drafts.present).cumprod(1)], 1)
    return reach * (1 - torch.cat([h * drafts.present, 0 * ones], 1)), share


def block_with_the_tokens_residual(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    law, share = block_law(p, drafts, q)
    return law, torch.ones_like(share)


def block_that_mixes_q_and_one_hot(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    return block_law(p, drafts, Q.one_hot(drafts))


def uncapped_block(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    """P_i without its minimum: a surplus early in the block pays for a deficit later."""
    law, _ = block_law(p, drafts, q)
    r = token.acceptance(p, drafts, q).cumprod(1)
    ones = torch.ones_like(r[:, :1])
    last = torch.cat([torch.zeros_like(r), r[:, -1:].clamp_max(1)], 1)
    return law * (1 - last[:, -1:]) / (1 - law[:, -1:]).clamp_min(1e-9) * (last == 0) + last, torch.cat([ones, r], 1)


def block_that_finds_no_surplus_after_the_end(p: Tensor, drafts: Drafts, q: Q) -> tuple[Tensor, Tensor]:
    share, h = block.acceptance(p, drafts, q)
    return _block_law(share, h * (p.sum(-1) > 0)[drafts.rows[:, 1:]], drafts)


def residual_of_p_alone(p: Tensor, drafts: Drafts, q: Q, accepted: Tensor, scale: Tensor) -> Tensor:
    return p[drafts.row_at(accepted)]


def residual_of_the_wrong_q(p: Tensor, drafts: Drafts, q: Q, accepted: Tensor, scale: Tensor) -> Tensor:
    return residual(p, drafts, Q(q.token_ids, q.probabilities.roll(1, 1)), accepted, scale)


@pytest.mark.parametrize(
    ("law", "rest"),
    [
        (ratio_inverted, residual),
        (token_law, residual_of_p_alone),
        (token_law, residual_of_the_wrong_q),
        (block_stopping_at_the_first_miss, residual),
        (block_with_the_tokens_residual, residual),
        (block_that_mixes_q_and_one_hot, residual),
        (uncapped_block, residual),
        (block_law, residual_of_p_alone),
        (block_law, residual_of_the_wrong_q),
    ],
)
def test_planted_bugs_are_refused(law: Acceptance, rest: Callable[..., Tensor]) -> None:
    assert error(world(3, 3, 1, "random"), law, 3, rest) > 1e-3


@pytest.mark.parametrize("rule", LAWS)
def test_a_round_that_fails_after_the_end_of_a_text_is_refused(rule: str) -> None:
    assert error(world(3, 3, 1, "ending"), LAWS[rule], 3, fails=True) > 1e-3


def test_a_blind_surplus_is_refused() -> None:
    assert error(world(3, 3, 1, "ending"), block_that_finds_no_surplus_after_the_end, 3) > 1e-3
