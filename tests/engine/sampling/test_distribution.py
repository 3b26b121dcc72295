"""Temperature, min-p, top-k and top-p against a token-by-token reference in vLLM's order and against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.sampling import distribution as module
from engine.sampling.distribution import distribution, head
from engine.sampling.draws import invert, race
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams

V = 300


def rows_of(*params: dict[str, Any], num_tokens: int = V) -> Rows:
    return Rows.after([SamplingState(SamplingParams(seed=i, **p), [1], 1, num_tokens) for i, p in enumerate(params)])


def logits_of(rows: int, seed: int = 0, num_tokens: int = V) -> torch.Tensor:
    return torch.randn(rows, num_tokens, generator=torch.Generator().manual_seed(seed)) * 3


def reference(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """One row, in numpy and in words: sort by (logit, lower id), cut, normalise."""
    x = logits.double().numpy()
    w = np.exp((x - x.max()) / params.temperature)
    w[w < params.min_p] = 0
    order = np.lexsort((np.arange(len(x)), -x))
    if params.top_k:
        w[order[params.top_k :]] = 0
    if params.top_p < 1:
        before, total = 0.0, w.sum()
        for v in order:
            mass = w[v]
            if before >= params.top_p * total:
                w[v] = 0
            before += mass
    return np.asarray(w / w.sum())


kinds = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.05, 0.7, 1.0, 1.8])},
    optional={
        "top_k": st.sampled_from([-1, 0, 1, 7, 290, 300, 1000]),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.001, 0.2, 1.0]),
    },
)


@settings(max_examples=150)
@given(st.lists(kinds, min_size=1, max_size=5), st.integers(0, 1000), st.booleans())
def test_against_the_reference(params: list[dict[str, Any]], seed: int, coarse: bool) -> None:
    logits = logits_of(len(params), seed)
    if coarse:
        logits = logits.bfloat16().float().mul(4).round().div(4)  # many ties
    rows = rows_of(*params)
    p = distribution(logits, rows).probabilities()
    for i, state in enumerate(rows.states):
        np.testing.assert_allclose(p[i].numpy(), reference(logits[i], state.params), rtol=1e-12, atol=1e-15)


def test_against_transformers() -> None:
    """On logits without ties, warpers applied in vLLM's order give the same support and the same probabilities."""
    logits = logits_of(3)
    p = distribution(logits, rows_of(*[{"temperature": 0.8, "min_p": 0.01, "top_k": 40, "top_p": 0.9}] * 3))
    ids = torch.zeros(3, 1, dtype=torch.int64)
    x = logits.double()
    for warper in (TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.01), TopKLogitsWarper(40), TopPLogitsWarper(0.9)):
        x = warper(ids, x)
    torch.testing.assert_close(p.probabilities(), x.softmax(-1), rtol=1e-6, atol=1e-9)


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = torch.zeros(1, 8)
    logits[0, [6, 2]] = 1.0
    assert distribution(logits, rows_of({"top_k": 4}, num_tokens=8)).probabilities()[
        0
    ].nonzero().flatten().tolist() == [
        0,
        1,
        2,
        6,
    ]


def test_survivors_are_few_and_the_same_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(4)
    rows = rows_of({"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.99, "temperature": 1.5})
    narrow = distribution(logits, rows)
    monkeypatch.setattr(module, "FIRST_WIDTH", 2)
    retried = distribution(logits, rows)
    full = head(logits, rows, V)
    assert narrow.weights.shape == retried.weights.shape
    assert narrow.weights.shape[1] < V
    assert torch.equal(narrow.probabilities(), retried.probabilities())
    torch.testing.assert_close(narrow.probabilities(), full.probabilities(), rtol=1e-13, atol=0)
    keys = torch.arange(4) * 12345
    picks = [d.tokens(race(d, keys).argmax(-1)).tolist() for d in (narrow, retried, full)]
    assert picks[0] == picks[1] == picks[2]


TRUNCATIONS: list[dict[str, Any]] = [
    *({"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.95, "min_p": 0.05}, {"min_p": 0.2}, {"top_k": 6}),
    *({"top_p": 0.8, "temperature": 0.3}, {"top_p": 0.99, "temperature": 3.0}, {"top_k": 8, "top_p": 0.7}),
]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("num_candidates", [1, 5, 9, 16, V - 1])
def test_candidates_are_all_survivors_or_say_so(
    num_candidates: int, coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: equal logits among them, the same tokens with the same weights as by the order of all."""
    monkeypatch.setattr(module, "_counts_survivors", lambda logits: False)
    monkeypatch.setattr(module, "NUM_CANDIDATES", num_candidates)
    rows = rows_of(*TRUNCATIONS * 20)
    logits = logits_of(len(rows))
    logits = logits.round() if coarse else logits
    found, wanted = distribution(logits, rows), distribution(logits, rows, exact=True)
    assert found.complete is not None
    assert wanted.complete is None
    assert found.token_ids is not None
    assert wanted.token_ids is not None
    width = found.weights.shape[1]
    assert width == max(num_candidates, 9)
    kept = found.weights > 0
    num_survivors = (wanted.weights > 0).sum(-1)
    for row in range(len(rows)):
        if not found.complete[row]:
            assert coarse or num_survivors[row] >= width
            continue
        count = int(num_survivors[row])
        assert count < width
        assert int(kept[row].sum()) == count
        assert torch.equal(found.token_ids[row, :count], wanted.token_ids[row, :count])
        assert torch.equal(found.weights[row, :count], wanted.weights[row, :count])
    assert found.complete.any()


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 1e6])
def test_nothing_is_ever_nan(params: dict[str, Any], temperature: float) -> None:
    logits = logits_of(6)
    logits[1] = -torch.inf
    logits[2, 5:] = -torch.inf
    logits[3, 7] = torch.nan
    logits[4, 7] = -torch.nan  # what 0 * inf gives on x86
    logits[5, 7] = torch.inf
    d = distribution(logits, rows_of(*[{**params, "temperature": temperature}] * 6))
    assert d.valid.tolist() == [True, False, True, False, False, False]
    assert not d.probabilities()[d.valid].isnan().any()
    assert (d.probabilities()[2, 5:] == 0).all()
    torch.testing.assert_close(d.probabilities().sum(-1)[d.valid], torch.ones(2, dtype=torch.float64))
    assert d.probabilities()[1].sum() == 0


def test_inverting_never_picks_a_token_of_weight_0() -> None:
    weights = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0]], dtype=torch.float64).expand(5, -1)
    u = torch.tensor([2.0**-53, 0.74, 0.76, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert invert(weights, u).tolist() == [1, 1, 3, 3, 3]
    assert invert(torch.tensor([[0.3, 0.3, 0.3, 0.0]], dtype=torch.float64), u[-1:]).tolist() == [2]
