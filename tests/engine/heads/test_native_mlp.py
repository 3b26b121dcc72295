"""MLP speculators on the native kernels against their modules."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from engine.heads.mlp_speculator import MlpSpeculator
from engine.heads.native.mlp_speculator import NativeMlp
from engine.native.draft_structs import CMlpStep
from engine.native.linears import NativeLinear
from engine.native.rounded import quantise_linears
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.heads.random_heads import VOCAB, eagle, mlp_chain, mlp_speculator

MODELS = {
    "tied": lambda: mlp_speculator(tie=True, scale=True),
    "untied": lambda: mlp_speculator(tie=False, scale=False, emb_dim=19, inner=21),
    "untied, wide": lambda: mlp_speculator(tie=False, scale=True, emb_dim=4200, inner=160, steps=3),
    "tied, one size": lambda: mlp_speculator(tie=True, scale=False, emb_dim=64, inner=64),
}


@dataclass(frozen=True)
class Job:
    state: SamplingState
    rule: Rule
    num_tokens: int


def make_jobs(count: int, num_tokens: Sequence[int], rule: Rule, **params: Any) -> list[Job]:
    jobs = []
    for i in range(count):
        prompt = [(7 * i + j) % VOCAB for j in range(5)]
        state = SamplingState(SamplingParams(seed=i, max_tokens=30, **params), prompt, 5, VOCAB)
        jobs.append(Job(state, rule, num_tokens[i % len(num_tokens)]))
    return jobs


def last_tokens(jobs: Sequence[Job]) -> list[int]:
    return [job.state.token_ids[-1] for job in jobs]


def states_for(mlp: MlpSpeculator, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, mlp.config.emb_dim, generator=torch.Generator().manual_seed(count)).to(dtype)


def native_of(mlp: MlpSpeculator, num_threads: int = 2) -> NativeMlp:
    native = NativeMlp.build(mlp, num_threads)
    assert native is not None
    return native


@torch.no_grad()
@pytest.mark.parametrize(
    ("rule", "params"),
    [
        (Rule.BLOCK, {"temperature": 0.0}),
        (Rule.BLOCK, {"temperature": 1.0}),
        (Rule.TOKEN, {"temperature": 0.9, "top_p": 0.8}),
        (Rule.COUPLED, {"temperature": 1.0, "frequency_penalty": 0.7}),
    ],
    ids=["greedy", "block", "token", "coupled"],
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 3, 8])
def test_chains_are_those_of_the_module(name: str, count: int, rule: Rule, params: dict[str, Any]) -> None:
    mlp = MODELS[name]()
    states = states_for(mlp, count)
    jobs = make_jobs(count, (3, 1, 2), rule, **params)
    wanted = mlp_chain(mlp, states, last_tokens(jobs), jobs)
    native = native_of(mlp)
    assert isinstance(mlp.head[0], NativeLinear)
    assert native.draft_chains(jobs, last_tokens(jobs), states) == wanted
    assert mlp_chain(mlp, states, last_tokens(jobs), jobs) == wanted  # the module still works


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 3])
def test_neither_threads_nor_neighbours_nor_the_states_dtype_matter(threads: int) -> None:
    mlp = MODELS["untied, wide"]()
    rounded = states_for(mlp, 20, torch.bfloat16)
    jobs = make_jobs(20, (3,), Rule.BLOCK, temperature=1.0)
    together = native_of(copy.deepcopy(mlp), threads).draft_chains(jobs, last_tokens(jobs), rounded)
    native = native_of(mlp)
    for i, job in enumerate(jobs):
        assert native.draft_chains([job], last_tokens([job]), rounded[i : i + 1].float()) == together[i : i + 1]


@torch.no_grad()
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.int8])
def test_rounded_weights_draft_what_the_rounded_module_does(weights: torch.dtype) -> None:
    """But for near ties, which rounding decides: nearly all greedy tokens."""
    mlp = mlp_speculator(tie=False, scale=True, emb_dim=128, inner=128)
    if weights is torch.int8:
        quantise_linears(mlp)
        module = copy.deepcopy(mlp)
    else:
        mlp = mlp.to(weights)
        module = copy.deepcopy(mlp).float()
    jobs = make_jobs(60, (1,), Rule.BLOCK, temperature=0.0)
    states = states_for(mlp, 60, torch.bfloat16)
    wanted = mlp_chain(module, states, last_tokens(jobs), jobs)
    found = native_of(mlp).draft_chains(jobs, last_tokens(jobs), states)
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 55


@torch.no_grad()
def test_a_stopped_chain_ends_with_what_it_has() -> None:
    mlp = MODELS["tied"]()
    jobs, states = make_jobs(3, (4,), Rule.COUPLED, temperature=1.0), states_for(mlp, 3)
    native = native_of(mlp)
    whole = native.draft_chains(jobs, last_tokens(jobs), states)
    stopped = native.draft_chains(jobs, last_tokens(jobs), states, np.array([0, 1, 0], dtype=np.int32))
    assert [len(chain.token_ids) for chain in stopped] == [4, 1, 4]
    assert [a.token_ids for a in stopped] == [whole[0].token_ids, whole[1].token_ids[:1], whole[2].token_ids]


@torch.no_grad()
def test_what_does_not_fit_is_refused() -> None:
    mlp = MODELS["tied"]()
    native = native_of(mlp)
    jobs = make_jobs(2, (4,), Rule.BLOCK)
    states = states_for(mlp, 2)
    for wrong in (states[:1], states[:, 1:], states.half()):
        with pytest.raises(ValueError, match="states"):
            native.draft_chains(jobs, [1, 2], wrong)
    with pytest.raises(ValueError, match="4 steps"):
        native.draft_chains(make_jobs(2, (5,), Rule.BLOCK), [1, 2], states)
    for token in (-1, VOCAB):
        with pytest.raises(InvalidRequest, match=f"vocabulary of {VOCAB}"):
            native.draft_chains(jobs, [1, token], states)
    for part in ("head", "emb", "ln"):
        mixed = MODELS["untied"]()
        getattr(mixed, part)[1].bfloat16()
        assert NativeMlp.build(mixed, 1) is None
    assert NativeMlp.build(eagle(), 1) is None


@pytest.mark.parametrize("part", ["scale", "scales_input", "norm", "embedding"])
def test_what_is_wrong_shows_at_load(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pack = NativeMlp.__init__

    def damaged(self: NativeMlp, *args: Any) -> None:
        pack(self, *args)
        steps = (CMlpStep * self.num_steps).from_address(self._struct.steps)
        if part == "scale":
            self._struct.scale *= 2
        elif part == "scales_input":
            self._struct.scales_input = 0
        elif part == "norm":
            steps[1].bias = steps[1].weight
        else:
            steps[2].embedding = steps[1].embedding

    monkeypatch.setattr(NativeMlp, "__init__", damaged)
    mlp = mlp_speculator(tie=False, scale=True)
    with caplog.at_level(logging.WARNING):
        assert NativeMlp.build(mlp, 1) is None
    assert "native speculator is not used: in step" in caplog.text
