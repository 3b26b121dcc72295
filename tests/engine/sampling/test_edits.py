"""Edits of the logits against transformers and against vLLM's formulas written out token by token; every row of a
round must be edited as if its tokens had been generated one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from engine.sampling.edits import edited
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from tests.engine.sampling.parameter_values import edits_of
from tests.engine.sampling.prefixed_rows import rows_after

V = 23
PROMPT = [1, 2, 3, 2, 5]
OUTPUT = [7, 8, 7, 2]


def state_of(tokens: list[int] = PROMPT + OUTPUT, **params: Any) -> SamplingState:
    return SamplingState(SamplingParams(seed=0, max_tokens=None, **params), tokens, len(PROMPT), V)


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def vllm_edits(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """vLLM v1: whitelist, bad words, min tokens, logit bias, then repetition, frequency and presence penalties."""
    x = logits.numpy().copy()
    if params.allowed_token_ids:
        for v in range(len(x)):
            if v not in params.allowed_token_ids:
                x[v] = -math.inf
    context = prompt + output
    for ids in params.bad_token_ids:
        head = list(ids[:-1])
        if not head or context[-len(head) :] == head:
            x[ids[-1]] = -math.inf
    if len(output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -math.inf
    for v, bias in params.logit_bias.items():
        x[v] += np.float32(bias)
    for v in range(len(x)):
        if v in context:
            r = np.float32(params.repetition_penalty)
            x[v] = x[v] / r if x[v] > 0 else x[v] * r
        count = output.count(v)
        x[v] -= np.float32(params.frequency_penalty) * count
        x[v] -= np.float32(params.presence_penalty) * (count > 0)
    return torch.from_numpy(x)


tokens = st.integers(0, V - 1)
parameters = edits_of(V)


@settings(max_examples=150)
@given(st.lists(parameters, min_size=1, max_size=4), st.lists(tokens, max_size=4), st.data())
def test_a_mixed_batch_of_rounds_is_edited_as_sequential_decoding(
    kinds: list[dict[str, Any]], chain: list[int], data: st.DataObject
) -> None:
    """Trap 6. Sessions with different features and chains in one call, each row against its own written-out edit."""
    chains = [data.draw(st.permutations(chain)) if i else chain for i in range(len(kinds))]
    chains = [ids[: len(ids) - i] if i < len(ids) else [] for i, ids in enumerate(chains)]  # ragged
    states = [state_of(**kind) for kind in kinds]
    rows = Rows.along(states, chains)
    logits = logits_of(len(rows))
    before = logits.clone()
    got = edited(logits, rows)
    assert torch.equal(logits, before), "the caller's logits were changed"
    r = 0
    for state, ids in zip(states, chains, strict=True):
        for n in range(len(ids) + 1):
            wanted = vllm_edits(logits[r], state.params, PROMPT, OUTPUT + ids[:n])
            torch.testing.assert_close(got[r], wanted, rtol=0, atol=2e-6)
            r += 1


@settings(max_examples=60)
@given(parameters, st.lists(tokens, min_size=1, max_size=5))
def test_prefix_equals_commit(kind: dict[str, Any], chain: list[int]) -> None:
    """A token edits the same whether it is drafted, here or elsewhere, or committed."""
    logits = logits_of(1)
    base = state_of(**kind)
    edited(logits, Rows.after([base]))  # the state's tensors exist before the tokens arrive
    drafted = Rows.after([base])
    for t in chain:
        drafted = drafted.extended(torch.tensor([t]))
    elsewhere = rows_after([base], [chain])
    committed = state_of(**kind)
    edited(logits, Rows.after([committed]))
    committed.commit(chain)
    fresh = state_of(PROMPT + OUTPUT + chain, **kind)
    wanted = edited(logits, Rows.after([fresh]))
    for rows in (drafted, elsewhere, Rows.after([committed])):
        assert torch.equal(edited(logits, rows), wanted)


@pytest.mark.parametrize("keep", [len(PROMPT + OUTPUT), len(PROMPT) + 1, 2])
def test_tokens_after_the_first_ones_replace_what_followed(keep: int) -> None:
    state, logits = state_of(presence_penalty=1.0, repetition_penalty=1.2), logits_of(1)
    with torch.inference_mode():
        edited(logits, Rows.after([state]))  # makes the counts
    after = state.committed(keep, [9, 7])
    assert (after is state) == (keep == len(PROMPT + OUTPUT))
    fresh = state_of([*(PROMPT + OUTPUT)[:keep], 9, 7], presence_penalty=1.0, repetition_penalty=1.2)
    assert after.token_ids == fresh.token_ids
    assert torch.equal(edited(logits, Rows.after([after])), edited(logits, Rows.after([fresh])))


def test_penalties_frozen_at_the_start_of_the_round_are_caught() -> None:
    """The planted twin of trap 6: rows without their prefix differ from sequential decoding."""
    state = state_of(presence_penalty=1.0)
    logits = logits_of(3)
    right = edited(logits, Rows.along([state], [[9, 10]]))
    frozen = edited(logits, Rows([state] * 3, torch.zeros(3, 0, dtype=torch.int64), [0] * 3))
    assert torch.equal(right[0], frozen[0])
    assert not torch.equal(right[1], frozen[1])
    assert not torch.equal(right[2], frozen[2])


def test_against_transformers() -> None:
    ids = torch.tensor([PROMPT + OUTPUT])
    logits = logits_of(1)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"repetition_penalty": 1.4}, RepetitionPenaltyLogitsProcessor(1.4)),
        (
            {"bad_token_ids": [[4], [7, 2, 9], [2, 9], [3, 9, 1]]},
            NoBadWordsLogitsProcessor([[4], [7, 2, 9], [2, 9], [3, 9, 1]], eos_token_id=V - 1),
        ),
        (
            {"min_tokens": 6, "stop_token_ids": [11, 12]},
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [11, 12], device="cpu"),
        ),
    ]
    for params, processor in cases:
        got = edited(logits, Rows.after([state_of(**params)]))
        torch.testing.assert_close(got, processor(ids, logits.clone()))
        assert not torch.equal(got, logits)


def test_nothing_is_copied_where_nothing_is_asked() -> None:
    logits = logits_of(4)
    rows = Rows.along([state_of()], [[1, 2, 3]])
    assert edited(logits, rows).data_ptr() == logits.data_ptr()


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    state = SamplingState(SamplingParams(seed=0), PROMPT, len(PROMPT), V, tokenizer_size=20)
    assert edited(logits_of(1), Rows.after([state])).shape == (1, 20)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, V]}, "allowed_token_ids"),
        ({"bad_token_ids": [[1, -1]]}, "bad_token_ids"),
        ({"bad_token_ids": [[i] for i in range(V)]}, "bad_token_ids"),
        ({"allowed_token_ids": [3], "bad_token_ids": [[3]]}, "bad_token_ids"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_parameters_that_leave_nothing_are_refused_at_once(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        state_of(**params)
    assert error.value.param == field


def test_a_state_needs_a_seed() -> None:
    with pytest.raises(InvalidRequest, match="seed"):
        SamplingState(SamplingParams(), [1], 1, V)


def test_rows_of_ragged_prefixes() -> None:
    states = [state_of(), state_of(), state_of()]
    rows = rows_after(states, [[4], [], [5, 6]])
    assert rows.positions == [10, 9, 11]
    rows = rows.extended(torch.tensor([10, 11, 12])).extended(torch.tensor([13, 14, 15]))
    assert rows.positions == [12, 11, 13]
    assert rows.bases == [9, 9, 9]
    context = PROMPT + OUTPUT
    wanted = [[*context, 4, 10, 13], [*context, 11, 14], [*context, 5, 6, 12, 15]]
    assert rows.tails(6).tolist() == [ids[-6:] for ids in wanted]
    assert rows.select([2, 0]).tails(3).tolist() == [wanted[2][-3:], wanted[0][-3:]]
    assert rows.tails(20)[1].tolist() == [-2] * 9 + wanted[1]


def test_a_commit_does_no_work_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft commits on its event loop; what is generated is counted where the counts are used."""
    state = state_of(presence_penalty=1.0)
    counts = state.output_counts
    with monkeypatch.context() as patch:
        patch.setattr("engine.sampling.state.send", lambda *_: pytest.fail("sent to the device"))
        patch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("made a tensor"))
        state.commit([3, 3, 4])
        state.commit([3])
    before = counts.clone()
    assert state.output_counts is counts
    assert (counts - before)[[3, 4]].tolist() == [3, 1]
    assert state.output_counts.sum() == state.num_output_tokens
