"""Losslessness of the compiled ratio rules by exact enumeration, seen from outside.

The kernels are given uniform numbers instead of noise. For every chain that can be drafted, bisection of each number
finds the probability of every outcome to 2^-53; summed up, they are the joint distribution of the next k + 1 tokens,
which must be the target's to 1e-12. Planted bugs are changes to the source; the same check must refuse each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.native.sampling_verify import verify_rounds
from engine.sampling.sparse import pack, unpack
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule, SparseRow
from target_service.verification.rounds import Round
from tests.target_service.verification.rules.planted import CHAIN_BUGS, PlantedVerifier

Array = npt.NDArray[np.float64]
#: Uniform numbers that let a draft pass if it can at all, and that let none pass.
PASS, FAIL = 0.0, np.inf


@dataclass(frozen=True)
class World:
    """Target logits and draft rows given every prefix of up to k tokens; prefixes in the order of ``prefixes``."""

    k: int
    prefixes: dict[tuple[int, ...], int]
    logits: torch.Tensor  # float32 [prefixes, V]
    q_rows: list[SparseRow]
    send_q: bool
    may_end: bool = False

    @property
    def num_tokens(self) -> int:
        return self.logits.shape[1]

    @property
    def p(self) -> Array:
        """Where the text has ended it goes on with token 0 for ever."""
        over = self.logits.isneginf().all(-1, keepdim=True)
        return self.logits.double().softmax(-1).where(~over, torch.arange(self.num_tokens) == 0).numpy()

    @property
    def q(self) -> Array:
        q = np.zeros(self.logits.shape)
        for i, row in enumerate(self.q_rows):
            ids, weights = unpack(row)
            q[i, ids] = weights / weights.sum()
        return q

    @property
    def joint(self) -> Array:
        """Joint distribution of k + 1 tokens under the target: [V] * (k + 1)."""
        joint, p = np.ones(()), self.p
        for n in range(self.k + 1):
            rows = [self.prefixes[x] for x in product(range(self.num_tokens), repeat=n)]
            joint = joint[..., None] * p[rows].reshape([self.num_tokens] * (n + 1))
        return joint


def bisect(count: int, is_below: Callable[[Array], npt.NDArray[np.bool_]]) -> Array:
    """For each of so many rounds the number up to which ``is_below`` holds, in [0, 1]."""
    low, high = np.zeros(count), np.ones(count)
    for _ in range(54):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


def law_of_token(count: int, num_tokens: int, token_of: Callable[[Array], npt.NDArray[np.int64]]) -> Array:
    """The distribution [B, V] of a token that grows with the uniform number it is chosen by."""
    ends = [bisect(count, lambda u, v=v: token_of(u) <= v) for v in range(num_tokens - 1)]  # type: ignore[misc]
    return np.diff(np.stack([np.zeros(count), *ends, np.ones(count)], 1), axis=1)


def world(num_tokens: int, k: int, seed: int, kind: str = "random") -> World:
    g = np.random.default_rng(seed)
    prefixes = {x: i for i, x in enumerate(x for n in range(k + 1) for x in product(range(num_tokens), repeat=n))}
    logits = g.normal(size=(len(prefixes), num_tokens)) * 2
    match kind:
        case "ending":  # no token may follow token 0, which ends the text
            drafts = logits + 0.5 * g.normal(size=logits.shape)
            logits[[i for x, i in prefixes.items() if 0 in x]] = -np.inf
        case "random":
            drafts = g.normal(size=logits.shape) * 2
        case "aligned":
            drafts = logits + 0.5 * g.normal(size=logits.shape)
        case _:
            drafts = -logits
    named = np.ones(logits.shape, dtype=bool)
    if kind in ("sparse", "one-hot"):  # q is 0 in places, and p in others
        named = g.random(logits.shape) < (0.6 if kind == "sparse" else 0)
        named[np.arange(len(named)), g.integers(num_tokens, size=len(named))] = True
        logits[:, 1:][g.random(logits[:, 1:].shape) < 0.3] = -np.inf
    levels = np.maximum(np.exp((drafts - drafts.max(-1, keepdims=True)) / 3) * 64, 1).astype(np.int64)
    rows = [pack(np.flatnonzero(use), level[use] - 1) for use, level in zip(named, levels, strict=True)]
    return World(k, prefixes, torch.from_numpy(logits).float(), rows, kind != "one-hot", kind == "ending")


class Chains:
    """All chains of a length as rounds of one step."""

    def __init__(self, w: World, rule: Rule, length: int, kernels: Any) -> None:
        state = SamplingState(SamplingParams(seed=0), [0], 1, w.num_tokens)
        self.rule, self.length, self.kernels = rule, length, kernels
        self.may_end = w.may_end
        self.ids = list(product(range(w.num_tokens), repeat=length))
        rows = [[w.prefixes[x[:n]] for n in range(length + 1)] for x in self.ids]
        self.logits = w.logits[[i for row in rows for i in row]].contiguous()
        q = w.q
        self.weight = np.array(
            [np.prod([q[row[i], v] for i, v in enumerate(x)]) for x, row in zip(self.ids, rows, strict=True)]
        )
        # A chain that cannot be drafted has no weight; its rows could not name its tokens.
        self.ids = [x if mass else () for x, mass in zip(self.ids, self.weight, strict=True)]
        self.rounds = [
            Round(state, rule, b * (length + 1), x, [w.q_rows[i] for i in row[: len(x)]] if w.send_q else ())
            for b, (x, row) in enumerate(zip(self.ids, rows, strict=True))
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def decide(self, accept: Array, rest: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(accepted, next token) where ``accept`` [B, length] and ``rest`` [B] are the uniform numbers; token 0 where
        the text has ended.
        """
        numbers = [[*a[: len(x)], *[r] * (len(x) + 1)] for a, r, x in zip(accept, rest, self.ids, strict=True)]
        decisions = verify_rounds(self.kernels, self.logits, self.rounds, numbers)
        assert decisions is not None
        accepted = np.array([d[0] for d in decisions])
        for end, x, (_, _, valid) in zip(accepted, self.ids, decisions, strict=True):
            assert valid == (not self.may_end or 0 not in x[:end])
        return accepted, np.array([token_id if valid else 0 for _, token_id, valid in decisions])

    def thresholds(self) -> Array:
        """The probability that draft i passes by itself: [B, length]. Under token, where the drafts before passed."""
        found = np.zeros((len(self), self.length))
        for i in range(self.length):
            numbers = np.full(found.shape, FAIL)
            if self.rule is Rule.TOKEN:
                numbers[:, :i] = PASS

            def is_below(u: Array, i: int = i, numbers: Array = numbers) -> npt.NDArray[np.bool_]:
                numbers[:, i] = u
                return self.decide(numbers, u)[0] == i + 1

            found[:, i] = bisect(len(self), is_below)
        return found

    def law(self) -> Array:
        """Pr[accepted = i]: [B, length + 1]."""
        h, ones = self.thresholds(), np.ones((len(self), 1))
        if self.rule is Rule.TOKEN:
            reach = np.concatenate([ones, h.cumprod(1)], 1)
            return reach * (1 - np.concatenate([h, 0 * ones], 1))
        none_later = np.concatenate([(1 - h)[:, ::-1].cumprod(1)[:, ::-1], ones], 1)
        return np.concatenate([ones, h], 1) * none_later

    def next_law(self, tau: int) -> Array:
        """The distribution of the token after ``tau`` accepted ones: [B, V]; nothing where that cannot be."""
        numbers = np.full((len(self), self.length), FAIL)
        numbers[:, (slice(tau) if self.rule is Rule.TOKEN else slice(max(0, tau - 1), tau))] = PASS
        accepted, _ = self.decide(numbers, np.zeros(len(self)))
        law = law_of_token(len(self), self.logits.shape[1], lambda u: self.decide(numbers, u)[1])
        return law * (accepted == tau)[:, None]


def error(w: World, rule: Rule, length: int, kernels: Any) -> tuple[float, float]:
    """Distance of the verified output's joint distribution from the target's, and expected accepted tokens."""
    v, k, joint = w.num_tokens, w.k, w.joint
    chains = Chains(w, rule, length, kernels)
    law, out, expected = chains.law(), np.zeros([v] * (k + 1)), 0.0
    for tau in range(length + 1):
        mass = (chains.weight * law[:, tau])[:, None] * chains.next_law(tau)
        expected += tau * mass.sum()
        heads = np.zeros([v] * (tau + 1))
        for x, row in zip(chains.ids, mass, strict=True):
            if x or not length:
                heads[tuple(x[:tau])] += row
        marginal = joint.reshape(*[v] * (tau + 1), -1).sum(-1)
        tail = joint / np.maximum(marginal, 1e-300).reshape([v] * (tau + 1) + [1] * (k - tau))
        out += heads.reshape([v] * (tau + 1) + [1] * (k - tau)) * tail
    return float(np.abs(out - joint).sum()), expected


KINDS = ["random", "adversarial", "aligned", "sparse", "one-hot", "ending"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_the_joint_distribution_is_the_targets(kernels: Any, rule: Rule, kind: str) -> None:
    for seed, (num_tokens, k) in enumerate([(2, 4), (3, 3), (5, 2)]):
        w = world(num_tokens, k, seed, kind)
        for length in {0, 1, k - 1, k}:
            distance, expected = error(w, rule, length, kernels)
            assert distance < 1e-12
            assert expected > 0 or length == 0


def test_a_chain_may_end_in_the_last_span(kernels: Any) -> None:
    """A vocabulary of several spans, all of it drawn from: the law of one token after a rejection and after none."""
    size = 600
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, size, generator=g) * 3
    p = logits[0].double().softmax(-1).numpy()
    ids = np.sort(np.random.default_rng(0).choice(size, 150, replace=False))
    row = pack(ids, np.arange(150) % 64)
    q = np.zeros(size)
    q[ids] = unpack(row)[1] / unpack(row)[1].sum()
    state = SamplingState(SamplingParams(seed=0), [0], 1, size)
    grid = (np.arange(20_000) + 0.5) / 20_000
    for drafted, q_rows, rest in (((int(ids[7]),), (row,), np.maximum(p - q, 0)), ((), (), p)):
        numbers = [[FAIL] * len(drafted) + [u] * (len(drafted) + 1) for u in grid]
        decisions = verify_rounds(kernels, logits, [Round(state, Rule.TOKEN, 0, drafted, q_rows)] * len(grid), numbers)
        assert decisions is not None
        wanted = np.searchsorted(rest.cumsum() / rest.sum(), grid, side="right")
        assert [token_id for _, token_id, _ in decisions] == wanted.tolist()


@pytest.mark.parametrize("bug", CHAIN_BUGS)
def test_planted_bugs_are_refused(planted: PlantedVerifier, bug: str) -> None:
    rule = Rule.TOKEN if bug.startswith(("the", "token")) else Rule.BLOCK
    worlds = [world(3, 3, seed, kind) for seed, kind in enumerate(["random", "adversarial", "sparse", "ending"])]
    broken = planted.with_bug(bug)
    assert any(error(w, rule, 3, broken)[0] > 1e-3 for w in worlds)


def test_the_build_with_switches_is_right_while_none_is_on(planted: PlantedVerifier) -> None:
    right = planted.with_bug(None)
    for rule in (Rule.TOKEN, Rule.BLOCK):
        assert error(world(3, 2, 0), rule, 2, right)[0] < 1e-12
