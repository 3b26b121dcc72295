"""Heads on the native kernels against their modules: steps, and chains over rounds with rejections between them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.chain_job import ChainJob
from engine.heads.native.eagle import NativeHead
from engine.kv_pool import KVPool
from engine.kv_sequence import KVSequence
from engine.native.chains import draft_chains
from engine.native.linears import NativeLinear
from engine.native.rounded import quantise_linears
from engine.sampling.drafting import DraftedChain
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.heads import random_heads
from tests.engine.heads.random_heads import HEADS, VOCAB, Head, chain, eagle, eagle3, random_features, run
from tests.engine.native.conftest import make_plan

BLOCK = 8


class Runner:
    """A native head and its cache, full of NaN: nothing may be read before it is written."""

    def __init__(
        self, head: Head, num_threads: int = 2, cache_dtype: torch.dtype = torch.float32, block: int = BLOCK
    ) -> None:
        self.pool = KVPool(100, block)
        layer = head.config.layer
        size = (101, layer.num_key_value_heads, block, layer.head_dim)
        caches = [torch.full((2, *size), torch.nan, dtype=cache_dtype).unbind() for _ in head.attentions]
        built = NativeHead.build(head, caches, num_threads)
        assert built is not None
        self.native = built

    def step(
        self,
        parts: Sequence[tuple[KVSequence, torch.Tensor, torch.Tensor]],
        *,
        are_features: bool,
        wanted: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Parts (sequence, ids, states) to logits and states of all or the wanted rows; all are cached."""
        counts = [len(ids) for _, ids, _ in parts]
        sequences = [sequence for sequence, _, _ in parts]
        plan = make_plan(
            [s.length for s in sequences], counts, [s.blocks.tolist() for s in sequences], self.pool.block_size
        )
        ids, states = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
        rows = torch.arange(len(ids)) if wanted is None else torch.tensor(wanted)
        return list(self.native.forward(ids, states, plan, rows, are_features=are_features))

    def draft(self, jobs: Sequence[ChainJob], stop: Any = None) -> list[DraftedChain]:
        return draft_chains(self.native, jobs, stop, block_size=self.pool.block_size, max_model_len=500)


def ids_of(count: int, seed: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, relative to the spread of what is wanted."""
    return float((found - wanted).square().mean().sqrt() / wanted.std())


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_steps_are_those_of_the_module(name: str) -> None:
    head = HEADS[name]()
    module = copy.deepcopy(head)
    runner = Runner(head)
    one, two = runner.pool.open(60), runner.pool.open(60)
    ids = {one: ids_of(50, 1), two: ids_of(50, 2)}
    states = {sequence: module.fuse(random_features(head, 20, i)) for i, sequence in enumerate((one, two))}
    for counts in ((1, 0), (5, 7), (0, 1), (13, 2), (1, 10)):  # ragged, with the target's features
        parts = []
        for i, (sequence, count) in enumerate(zip((one, two), counts, strict=True)):
            at = sequence.length
            if count:
                features = random_features(head, 20, i)[at : at + count]
                parts.append((sequence, ids[sequence][at : at + count], features))
        logits, brought = runner.step(parts, are_features=True)
        whole = [run(module, ids[s][: s.length].tolist(), states[s][: s.length])[-len(part) :] for s, part, _ in parts]
        torch.testing.assert_close(brought, torch.cat(whole), atol=1e-4, rtol=0)
        torch.testing.assert_close(logits, module.logits(torch.cat(whole)), atol=1e-4, rtol=0)
    last = {one: brought[:1], two: brought[-1:]}
    for _ in range(4):  # then each on its own state
        for sequence in (one, two):
            states[sequence] = torch.cat((states[sequence][: sequence.length], last[sequence]))
        parts = [(s, ids[s][s.length : s.length + 1], last[s]) for s in (one, two)]
        logits, brought = runner.step(parts, are_features=False)
        whole = [run(module, ids[s][: s.length].tolist(), states[s])[-1:] for s in (one, two)]
        torch.testing.assert_close(brought, torch.cat(whole), atol=2e-4, rtol=0)
        torch.testing.assert_close(logits, module.logits(torch.cat(whole)), atol=2e-4, rtol=0)
        last = {one: brought[:1], two: brought[1:]}
    assert isinstance(head.fc, NativeLinear)
    token_ids = ids[one][: one.length].tolist()  # and the module still works
    assert distance(run(head, token_ids, states[one]), run(module, token_ids, states[one])) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("are_features", [True, False])
@pytest.mark.parametrize("wanted", [[], [0], [4], [2, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, normed residual"])
def test_only_wanted_rows_are_brought(name: str, wanted: list[int], are_features: bool) -> None:
    head = HEADS[name]()
    states = random_features(head, 12, 5)
    if not are_features:
        states = head.fuse(states)
    for num_threads in (1, 2):
        results = []
        for rows in (None, wanted):
            runner = Runner(copy.deepcopy(head), num_threads)
            parts = [(runner.pool.open(12), ids_of(7, 1), states[:7]), (runner.pool.open(12), ids_of(5, 2), states[7:])]
            results.append(runner.step(parts, are_features=are_features, wanted=rows))
        for whole, part in zip(*results, strict=True):
            assert torch.equal(whole[wanted], part)


@torch.no_grad()
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, wide"])
def test_rounded_weights_give_what_the_rounded_module_does(name: str, weights: torch.dtype) -> None:
    head = HEADS[name]()
    if weights is torch.int8:
        quantise_linears(head)
        module = copy.deepcopy(head)
    else:
        head = head.to(weights)
        module = copy.deepcopy(head).float()
    runner = Runner(head, cache_dtype=torch.float32 if weights is torch.int8 else weights)
    sequence = runner.pool.open(40)
    ids, features = ids_of(30, 3), random_features(head, 30, 3, torch.bfloat16)
    states = module.fuse(features.float())
    logits, brought = runner.step([(sequence, ids, features)], are_features=True)
    whole = run(module, ids.tolist(), states)
    tolerance = 2e-3 if weights is torch.int8 else 3e-2
    assert distance(brought, whole) < tolerance
    assert distance(logits, module.logits(whole)) < tolerance


class Session:
    """What a session has committed: pairs of a token and the features before it, and the state of its sampling."""

    def __init__(self, head: Head, runner: Runner, seed: int, rule: Rule, **params: Any) -> None:
        self.head, self.seed, self.rule = head, seed, rule
        self.token_ids = ids_of(7 + seed, seed).tolist()
        self.params = SamplingParams(seed=seed, max_tokens=60, **params)
        self.state = SamplingState(self.params, self.token_ids, len(self.token_ids), VOCAB)
        self.sequence = runner.pool.open(80)
        self.dtype = torch.float32

    @property
    def features(self) -> torch.Tensor:
        return random_features(self.head, 80, self.seed, self.dtype)[: len(self.token_ids) - 1]

    def job(self, num_tokens: int) -> ChainJob:
        """The pairs that are not in the cache: the features at t stand beside the token at t + 1."""
        done = self.sequence.length
        return ChainJob(
            self.sequence,
            self.token_ids[done + 1 :],
            num_tokens,
            self.state,
            self.rule,
            features=self.features[done:],
        )

    def wanted(self, module: Head, num_tokens: int) -> DraftedChain:
        ids = self.token_ids[1:]
        return chain(module, ids, self.features, num_tokens, self.state, self.rule)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.state.commit(list(token_ids))


SAMPLING: dict[str, tuple[Rule, dict[str, Any]]] = {
    "greedy": (Rule.BLOCK, {"temperature": 0.0}),
    "block": (Rule.BLOCK, {"temperature": 1.0}),
    "token, truncated": (Rule.TOKEN, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}),
    "coupled": (Rule.COUPLED, {"temperature": 1.0}),
    "coupled, truncated": (Rule.COUPLED, {"temperature": 1.2, "min_p": 0.02}),
    "penalised": (Rule.COUPLED, {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4}),
    "edited": (
        Rule.BLOCK,
        {
            "temperature": 1.0,
            "logit_bias": {3: 4.0, 50: -2.0, 96: 6.0},
            "allowed_token_ids": tuple(range(2, 97)),
            "bad_token_ids": ((5,), (7, 9)),
        },
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, all tokens"])
def test_chains_are_those_of_the_module_round_after_round(name: str, sampling: str) -> None:
    """Batches of 1, 3 and 8 sessions whose drafts are accepted in part, so that the cache is rewound."""
    head = HEADS[name]()
    module = copy.deepcopy(head)
    runner = Runner(head)
    rule, params = SAMPLING[sampling]
    sessions = [Session(head, runner, seed, rule, **params) for seed in range(8)]
    for batch in ([0], [1, 0, 2], range(8), range(8), [5]):
        chosen = [sessions[i] for i in batch]
        lengths = [i % 5 + 1 for i in range(len(chosen))]
        drafted = runner.draft([s.job(k) for s, k in zip(chosen, lengths, strict=True)])
        for i, (session, k, found) in enumerate(zip(chosen, lengths, drafted, strict=True)):
            assert found == session.wanted(module, k)
            assert session.sequence.length == len(session.token_ids) - 1  # drafted entries are fed again
            session.commit([*found.token_ids[: i % 3], (13 * i + k) % VOCAB])
    if sampling != "greedy" and rule is not Rule.COUPLED:
        assert all(found.q_rows for found in drafted)


@torch.no_grad()
def test_only_tokens_of_the_draft_vocabulary_are_drafted() -> None:
    head = eagle3()
    drawn = set(head.to_target_ids(torch.arange(41)).tolist())
    runner = Runner(head)
    session = Session(head, runner, 1, Rule.COUPLED, temperature=5.0)
    tokens: list[int] = []
    for _ in range(3):
        tokens += runner.draft([session.job(20)])[0].token_ids
        session.commit(tokens[-1:])
    assert len(set(tokens)) > 10
    assert set(tokens) <= drawn < set(range(VOCAB))


@torch.no_grad()
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_chain_does_not_depend_on_threads_and_neighbours(num_threads: int) -> None:
    for make in (eagle, eagle3):
        head = make()
        alone, together = Runner(copy.deepcopy(head), 2), Runner(head, num_threads)
        first = Session(head, alone, 4, Rule.BLOCK, temperature=1.0)
        others = [Session(head, together, seed, Rule.BLOCK, temperature=1.0) for seed in (3, 4, 9)]
        jobs = [other.job(k) for other, k in zip(others, (4, 9, 2), strict=True)]
        assert alone.draft([first.job(9)])[0] == together.draft(jobs)[1]


@torch.no_grad()
def test_prompts_are_taken_in_by_parts() -> None:
    head = eagle3()
    runner = Runner(head)
    whole, parts = (Session(head, runner, 8, Rule.BLOCK, temperature=1.0) for _ in range(2))
    job = parts.job(0)
    for start in range(0, len(job.token_ids), 4):
        end = start + 4
        part = replace(job, token_ids=job.token_ids[start:end], features=job.features[start:end])
        assert runner.draft([part]) == [DraftedChain(())]
    parts.sequence.length -= 1  # the last pair is fed again for its logits
    assert runner.draft([parts.job(5)]) == runner.draft([whole.job(5)])


@torch.no_grad()
def test_bfloat16_features_are_those_numbers() -> None:
    head = eagle3()
    runner = Runner(head)
    exact, rounded = (Session(head, runner, 6, Rule.BLOCK, temperature=1.0) for _ in range(2))
    rounded.dtype = torch.bfloat16
    job = replace(exact.job(6), features=rounded.features.float())
    assert runner.draft([job]) == runner.draft([rounded.job(6)])


@torch.no_grad()
def test_a_stopped_chain_ends_with_what_it_has() -> None:
    head = eagle3()
    runner = Runner(head)
    sessions = [Session(head, runner, seed, Rule.BLOCK, temperature=0.0) for seed in range(3)]
    wanted = [session.wanted(head, 6) for session in sessions]
    chains = runner.draft([session.job(6) for session in sessions], np.array([0, 1, 0], dtype=np.int32))
    assert chains[0] == wanted[0]
    assert chains[1].token_ids == wanted[1].token_ids[:1]
    assert chains[2] == wanted[2]


@torch.no_grad()
def test_what_does_not_fit_is_refused() -> None:
    head = eagle3()
    runner = Runner(head)
    session = Session(head, runner, 2, Rule.BLOCK)
    job = session.job(3)
    for features in (
        None,
        job.features[1:],
        job.features[:, 1:],
        job.features.half(),
        job.features.t().contiguous().t(),
    ):
        with pytest.raises(ValueError, match="features"):
            runner.draft([replace(job, features=features)])
    session.token_ids[-1] = VOCAB
    with pytest.raises(InvalidRequest, match=f"vocabulary of {VOCAB}"):
        runner.draft([session.job(3)])
    session.token_ids[-1] = 1
    with pytest.raises(ValueError, match="room"):
        runner.draft([session.job(80)])
    assert session.sequence.length == 0


def test_unknown_heads_are_left_to_their_modules() -> None:
    caches = [(torch.zeros(3, 2, 8, 8), torch.zeros(3, 2, 8, 8))]
    doubled = eagle3()
    doubled.d2t[1] = doubled.d2t[0] - 1
    beyond = eagle3()
    beyond.d2t[40] = VOCAB
    mixed = eagle3()
    mixed.midlayer.mlp.down_proj.bfloat16()
    for head in (doubled, beyond, mixed, torch.nn.Linear(3, 3)):
        assert NativeHead.build(head, caches, 1) is None
    both = random_heads.eagle3(norm_before_fc=True, fc_norm=True)
    assert NativeHead.build(both, caches, 1) is None
    assert NativeHead.build(eagle3(), [(part.half(), part.half()) for part, _ in caches], 1) is None
    assert NativeHead.build(eagle3(), caches, 1) is not None
