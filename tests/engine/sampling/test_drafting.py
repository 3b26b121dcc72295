"""Drafting: the token under each rule, q sent equal to q drawn from, and one transfer at the end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from engine.sampling import drafting
from engine.sampling.distribution import distribution
from engine.sampling.drafting import collect, draft, draw_quantized
from engine.sampling.draws import race
from engine.sampling.edits import edited
from engine.sampling.noise import Stream
from engine.sampling.rows import Rows
from engine.sampling.sparse import NUM_LEVELS, max_tokens, unpack
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.sampling.prefixed_rows import rows_after

V = 200


def states_of(count: int, **params: object) -> list[SamplingState]:
    return [SamplingState(SamplingParams(seed=i, **params), [1, 2, 3], 2, V) for i in range(count)]  # type: ignore[arg-type]


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("rule", list(Rule))
def test_greedy_is_the_argmax_and_sends_no_q(rule: Rule) -> None:
    logits = logits_of(3)
    drafted = draft(logits, Rows.after(states_of(3, temperature=0.0)), [rule] * 3)
    assert torch.equal(drafted.token_ids, logits.argmax(-1))
    assert all(not chain.q_rows for chain in collect([drafted]))


def test_coupled_draws_with_the_noise_of_its_position() -> None:
    states = states_of(5)
    rows = rows_after(states, [[], [7], [], [], [9, 9]])
    logits = logits_of(5)
    drafted = draft(logits, rows, [Rule.COUPLED] * 5)
    keys = torch.tensor([s.noise_key(Stream.COUPLING, n) for s, n in zip(states, [3, 4, 3, 3, 5], strict=True)])
    scores = race(distribution(logits, rows), keys)
    assert torch.equal(drafted.token_ids, scores.argmax(-1))
    assert drafted.q_weights is None


@pytest.mark.parametrize("count", [1000, 2])
def test_a_mixed_batch_drafts_as_each_row_alone(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in parts of two rows."""
    monkeypatch.setattr(drafting, "MAX_NUMBERS", count * V)
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {3: 50.0}},
    ]
    states = [s for kind in kinds for s in states_of(3, **kind)]
    rules = list(Rule) * len(kinds)
    rows = rows_after(states, [[i] * (i % 3) for i in range(len(states))])
    logits = logits_of(len(states))
    together = draft(logits, rows, rules)
    chains = collect([together])
    for i in range(len(states)):
        alone = draft(logits[i : i + 1], rows.select([i]), rules[i : i + 1])
        assert collect([alone]) == [chains[i]]
        assert bool(chains[i].q_rows) == (rules[i] is not Rule.COUPLED and not states[i].params.greedy)


def test_the_token_is_drawn_from_the_row_that_is_sent() -> None:
    """Trap 2: over many seeds the drawn tokens fit the integer weights of the one row that all of them send."""
    count = 6000
    states = states_of(count, temperature=0.9, top_k=12, min_p=0.02)
    logits = logits_of(1).expand(count, V)
    chains = collect([draft(logits, Rows.after(states), [Rule.BLOCK] * count)])
    (row,) = {chain.q_rows[0] for chain in chains}
    tokens = np.array([chain.token_ids[0] for chain in chains])
    ids, weights = unpack(row)
    counts = np.array([(tokens == v).sum() for v in ids])
    assert counts.sum() == count
    assert stats.chisquare(counts, weights / weights.sum() * count, sum_check=False).pvalue > 1e-3
    # The planted twin: the draft's row without its truncation is another distribution.
    plain = collect([draft(logits[:1], Rows.after(states_of(1)), [Rule.BLOCK])])[0].q_rows[0]
    other = dict(zip(*unpack(plain), strict=True))
    twin = np.array([other[v] for v in ids])
    assert stats.chisquare(counts, twin / twin.sum() * count, sum_check=False).pvalue < 1e-9


def test_q_rows_are_what_the_wire_wants() -> None:
    chains = collect([draft(logits_of(4) * 4, Rows.after(states_of(4)), [Rule.TOKEN] * 4)])
    for chain in chains:
        (row,) = chain.q_rows
        ids, weights = unpack(row)
        assert len(ids) == len(weights) <= max_tokens(V)
        assert weights.max() == NUM_LEVELS**3
        assert chain.token_ids[0] in ids


def test_tickets_cover_exactly_their_weights() -> None:
    weights = torch.tensor([[3, 0, 1, 2]])
    u = [(i + 0.5) / 6 for i in range(6)] + [2.0**-53, 1 - 2.0**-53]
    got = draw_quantized(weights.expand(8, 4), torch.tensor(u, dtype=torch.float64)[:, None])
    assert got.tolist() == [0, 0, 0, 2, 3, 3, 0, 3]


def test_successive_steps_use_fresh_noise_and_edits_of_their_prefix() -> None:
    states = states_of(4, frequency_penalty=2.0)
    rules = [Rule.BLOCK, Rule.COUPLED, Rule.TOKEN, Rule.COUPLED]
    logits = logits_of(4)
    rows = Rows.after(states)
    steps = []
    for _ in range(5):
        steps.append(draft(logits, rows, rules))
        rows = rows.extended(steps[-1].token_ids)
    chains = collect(steps, counts=[5, 4, 0, 1])
    assert [len(chain.token_ids) for chain in chains] == [5, 4, 0, 1]
    assert [len(chain.q_rows) for chain in chains] == [5, 0, 0, 0]
    for i, chain in enumerate(chains):
        for n, token_id in enumerate(chain.token_ids):  # each again from scratch
            if rules[i] is Rule.COUPLED:
                again = rows_after([states[i]], [chain.token_ids[:n]])
                assert int(draft(logits[i : i + 1], again, [rules[i]]).token_ids) == token_id
    assert torch.equal(edited(logits, rows)[1], edited(logits[1:2], rows.select([1]))[0])


def test_a_row_without_tokens_drafts_something() -> None:
    for rule in Rule:
        for params in ({}, {"top_p": 0.5}, {"temperature": 0.0}):
            logits = torch.full((2, V), -torch.inf)
            logits[1, 3] = torch.nan
            drafted = draft(logits, Rows.after(states_of(2, **params)), [rule] * 2)
            assert ((drafted.token_ids >= 0) & (drafted.token_ids < V)).all()
            for chain in collect([drafted]):
                assert all(len(unpack(row)[0]) for row in chain.q_rows)


def test_nothing_drafted() -> None:
    assert collect([], counts=[0, 0])[1].token_ids == ()
    assert collect([]) == []
