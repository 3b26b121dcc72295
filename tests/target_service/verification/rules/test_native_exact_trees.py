"""Losslessness of the compiled ratio rule on trees by exact enumeration, seen from outside, as ``test_native_exact.py``
shows it for chains: bisection of the uniform numbers finds the probability of every outcome."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.native.sampling_verify import verify_rounds
from engine.sampling.state import SamplingState
from specdec import trees
from specdec.params import SamplingParams
from specdec.rules import Rule
from target_service.verification.rounds import Round
from tests.target_service.verification.rules.planted import TREE_BUGS, PlantedVerifier
from tests.target_service.verification.rules.test_native_exact import (
    FAIL,
    PASS,
    Array,
    World,
    bisect,
    law_of_token,
    world,
)

#: Pairs after the committed tokens and after one of them, three siblings, a chain beside a leaf.
SHAPES = [(-1, -1), (-1, -1, -1), (-1, -1, 0, 0), (-1, 0, -1, 1)]


class Trees:
    """All trees of a shape whose siblings differ, as rounds of one step, and the probability of drawing each."""

    def __init__(self, w: World, parents: Sequence[int], kernels: Any) -> None:
        state = SamplingState(SamplingParams(seed=0), [0], 1, w.num_tokens)
        self.parents, self.kernels, q = parents, kernels, w.q
        self.ids, self.weight, self.rounds, rows = [], [], [], []
        for x in product(range(w.num_tokens), repeat=len(parents)):
            weight, places = 1.0, [tuple(x[i] for i in trees.path_to(parents, n)) for n in range(-1, len(parents))]
            row_of = [w.prefixes[path] for path in places]
            for node, parent in enumerate(parents):
                earlier = [x[i] for i in range(node) if parents[i] == parent]
                left = 1 - q[row_of[parent + 1], earlier].sum()
                weight *= 0.0 if x[node] in earlier or left < 1e-15 else q[row_of[parent + 1], x[node]] / left
            if not w.send_q:
                weight = float(len({*zip(parents, x, strict=True)}) == len(x))
            if not weight:
                continue
            firsts = dict.fromkeys(parents)
            q_rows = [w.q_rows[row_of[parent + 1]] for parent in firsts] if w.send_q else ()
            self.rounds.append(Round(state, Rule.BLOCK, len(rows), x, q_rows, None, parents))
            self.ids.append(x)
            self.weight.append(weight)
            rows += row_of
        self.logits = w.logits[rows].contiguous()

    def decide(self, accept: Array, rest: Array) -> npt.NDArray[np.int64]:
        """(end, next token) [B, 2] where ``accept`` [B, nodes] and ``rest`` [B] are the uniform numbers."""
        count = len(self.parents)
        numbers = [[*a, *[r] * (2 * count + 1)] for a, r in zip(accept, rest, strict=True)]
        decisions = verify_rounds(self.kernels, self.logits, self.rounds, numbers)
        assert decisions is not None
        return np.array([(end, token_id if valid else 0) for end, token_id, valid in decisions])  # 0: it has ended

    def passing(self, node: int) -> Array:
        """Numbers [B, nodes] that let the path to a token pass and nothing else."""
        numbers = np.full((len(self.ids), len(self.parents)), FAIL)
        numbers[:, trees.path_to(self.parents, node)] = PASS
        return numbers

    def ratio(self, node: int) -> Array:
        """The probability that a token passes where those before it on its path did and its elder siblings did not."""
        numbers = self.passing(self.parents[node])

        def is_below(u: Array) -> npt.NDArray[np.bool_]:
            numbers[:, node] = u
            return self.decide(numbers, u)[:, 0] == node + 1

        return bisect(len(self.ids), is_below)

    def next_law(self, place: int, num_tokens: int) -> Array:
        """The distribution of the token at a place where nothing more passes: [B, V]; nothing where that cannot be."""
        numbers = self.passing(place - 1)
        there = self.decide(numbers, np.zeros(len(self.ids)))[:, 0] == place
        law = law_of_token(len(self.ids), num_tokens, lambda u: self.decide(numbers, u)[:, 1])
        return law * there[:, None]


def error(w: World, parents: Sequence[int], kernels: Any) -> float:
    """Distance of the verified output's joint distribution from the target's; without q the worst tree's."""
    v, k, joint = w.num_tokens, w.k, w.joint
    drafted = Trees(w, parents, kernels)
    reach = np.zeros((len(drafted.ids), len(parents) + 1))
    reach[:, 0] = drafted.weight
    out = np.zeros([len(drafted.ids), *[v] * (k + 1)])
    for place in range(len(parents) + 1):
        left = reach[:, place].copy()
        for node in (node for node, parent in enumerate(parents) if parent == place - 1):
            ratio = drafted.ratio(node)
            reach[:, node + 1], left = left * ratio, left * (1 - ratio)
        path = trees.path_to(parents, place - 1)
        mass, count = left[:, None] * drafted.next_law(place, v), len(path)
        marginal = joint.reshape(*[v] * (count + 1), -1).sum(-1)
        tail = joint / np.maximum(marginal, 1e-300).reshape([v] * (count + 1) + [1] * (k - count))
        for b, x in enumerate(drafted.ids):
            head = tuple(x[i] for i in path)
            out[(b, *head)] += mass[b].reshape([v] + [1] * (k - count)) * tail[head]
    if not w.send_q:
        return float(np.abs(out - joint).reshape(len(out), -1).sum(1).max())
    return float(np.abs(out.sum(0) - joint).sum())


@pytest.mark.parametrize("kind", ["random", "adversarial", "aligned", "one-hot", "ending"])
@pytest.mark.parametrize("parents", SHAPES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_joint_distribution_is_the_targets(kernels: Any, seed: int, parents: Sequence[int], kind: str) -> None:
    w = world(4 if len(parents) < 4 else 3, max(trees.depths(parents)) + 1, seed, kind)
    assert error(w, parents, kernels) < 1e-12


@pytest.mark.parametrize("bug", TREE_BUGS)
def test_planted_bugs_are_refused(planted: PlantedVerifier, bug: str) -> None:
    worlds = [world(5, 1, seed, kind) for seed, kind in enumerate(["random", "adversarial", "sparse", "ending"], 2)]
    broken = planted.with_bug(bug)
    assert any(error(w, (-1, -1, -1), broken) > 1e-3 for w in worlds)


def test_the_build_with_switches_is_right_while_none_is_on(planted: PlantedVerifier) -> None:
    assert error(world(4, 1, 0), (-1, -1), planted.with_bug(None)) < 1e-12
