"""Kernels that draw tokens against the torch functions they stand in for, on random rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.drafting import DraftedChain, collect, draft
from engine.sampling.rows import Rows
from engine.sampling.sparse import unpack
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.native.drafted_rows import draft_rows
from tests.engine.sampling.parameter_values import edits_of, shapes
from tests.engine.sampling.prefixed_rows import rows_after

pytestmark = pytest.mark.usefixtures("kernels")

PROMPT = [1, 2, 3, 2, 5]
OUTPUT = [7, 8, 7, 2]
SIZES = [17, 23, 64, 300, 1000, 5003]

tokens = st.integers(0, 15)
edits = edits_of(16)


def state_of(size: int, seed: int = 0, **params: Any) -> SamplingState:
    return SamplingState(
        SamplingParams(seed=seed, max_tokens=None, **params),
        PROMPT + OUTPUT,
        len(PROMPT),
        size,
        tokenizer_size=size - 1,
    )


def logits_of(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def by_torch(logits: torch.Tensor, rows: Rows, rules: list[Rule]) -> list[DraftedChain]:
    return collect([draft(logits, rows, rules)])


def natively(logits: torch.Tensor, rows: Rows, rules: list[Rule]) -> list[DraftedChain]:
    return draft_rows(logits.clone(), rows, rules)


@settings(max_examples=300)
@given(st.sampled_from(SIZES), st.lists(shapes, min_size=1, max_size=4), st.data())
def test_rows_are_drawn_as_torch_draws_them(size: int, kinds: list[dict[str, Any]], data: st.DataObject) -> None:
    """Tokens, q rows byte for byte; every shape, edit and prefix in one batch."""
    seed = data.draw(st.integers(0, 10**6))
    changes = [data.draw(edits) if data.draw(st.booleans()) else {} for _ in kinds]
    states = [
        state_of(size, seed + i, **shape, **change)
        for i, (shape, change) in enumerate(zip(kinds, changes, strict=True))
    ]
    rules = [data.draw(st.sampled_from(list(Rule))) for _ in states]
    rows = rows_after(states, [data.draw(st.lists(tokens, max_size=3)) for _ in states])
    for _ in range(data.draw(st.integers(0, 3))):
        rows = rows.extended(torch.tensor([data.draw(tokens) for _ in states]))
    logits = logits_of(len(states), size, seed)
    assert natively(logits, rows, rules) == by_torch(logits, rows, rules)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize(
    "params",
    [
        *({}, {"top_p": 0.8}),
        *(
            pytest.param(params, marks=pytest.mark.exhaustive)
            for params in ({"top_k": 40}, {"temperature": 0.6}, {"min_p": 0.02})
        ),
    ],
)
def test_thousands_of_rows(params: dict[str, Any], rule: Rule) -> None:
    size, count = 4096, 2000
    states = [state_of(size, seed, **params) for seed in range(count)]
    logits, rows = logits_of(count, size), Rows.after(states)
    wanted, got = (f(logits, rows, [rule] * count) for f in (by_torch, natively))
    assert sum(a == b for a, b in zip(wanted, got, strict=True)) >= count - 1  # a level may round differently


def test_ties_go_to_the_lower_id() -> None:
    for size in SIZES:
        for coarse in (1.0, 2.0):
            logits = (logits_of(40, size) / coarse).round()
            for params in ({"temperature": 0.0}, {"top_k": 9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.3}):
                for rule in Rule:
                    rows = Rows.after([state_of(size, seed, **params) for seed in range(40)])
                    assert natively(logits, rows, [rule] * 40) == by_torch(logits, rows, [rule] * 40)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 1e-300}, {"min_p": 0.5}])
def test_rows_that_mean_nothing_still_give_a_token(rule: Rule, params: dict[str, Any]) -> None:
    logits = logits_of(5, 300)
    logits[0] = -torch.inf
    logits[1, 3] = torch.nan
    logits[2, 299] = -torch.nan  # padding: not looked at
    logits[3] = torch.nan
    logits[4, 7] = torch.inf
    chains = natively(logits, Rows.after([state_of(300, seed, **params) for seed in range(5)]), [rule] * 5)
    for chain in chains:
        assert 0 <= chain.token_ids[0] < 299
        assert all(len(unpack(row)[0]) for row in chain.q_rows)
    assert chains[2] == natively(logits[2:3], Rows.after([state_of(300, 2, **params)]), [rule])[0]


def test_few_tokens_are_left() -> None:
    """All but two tokens masked: one of those is drawn."""
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [250, 20]] = 0.5
    for rule in Rule:
        for temperature in (0.0, 1.0):
            rows = Rows.after([state_of(300, 1, temperature=temperature)])
            (chain,) = natively(logits, rows, [rule])
            assert chain.token_ids[0] in {20, 250}
            assert chain == by_torch(logits, rows, [rule])[0]


def test_a_huge_vocabulary() -> None:
    size = 128_256
    logits = logits_of(6, size)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_k": 50},
        {"top_p": 0.999, "temperature": 1.5},
        {"min_p": 1e-4},
    ]
    for params in kinds:
        for rule in Rule:
            rows = Rows.after([state_of(size, seed, **params) for seed in range(6)])
            got, wanted = natively(logits, rows, [rule] * 6), by_torch(logits, rows, [rule] * 6)
            assert got == wanted


def test_counts_follow_what_is_committed() -> None:
    params = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 7, "stop_token_ids": [3, 4]}
    params |= {"bad_token_ids": [[7, 2, 9], [9, 9, 8]], "logit_bias": {9: 6.0, 8: 5.5, 3: 5.0}, "temperature": 0.0}
    state, other = state_of(40, **params), state_of(40, **params)
    for n in range(12):
        logits = logits_of(1, 40, n)
        (chain,) = natively(logits, Rows.after([state]), [Rule.BLOCK])
        (wanted,) = by_torch(logits, Rows.after([other]), [Rule.BLOCK])
        assert chain == wanted
        state.commit(chain.token_ids)
        other.commit(chain.token_ids)
    assert np.unique(state.token_ids[-12:]).size > 3
