"""The verifier's kernels against its rules on tensors: every rule and parameter, chains and batches of every size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.native import library
from engine.sampling.drafting import collect, draft
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.errors import InternalError, InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule, SparseRow
from target_service.verification.rounds import Outcome, Round, check_draft
from target_service.verification.verifier import Verifier
from tests.engine.sampling.parameter_values import edits_of, shapes
from tests.pairwise import parametrize_pairwise

PROMPT, OUTPUT = [1, 2, 3, 2, 5], [7, 8, 7, 2]
SIZES = [17, 64, 300, 1000, 5003]

edits = edits_of(16)

pytestmark = pytest.mark.usefixtures("kernels")


def both(logits: torch.Tensor, rounds: list[Round]) -> tuple[list[Outcome], list[Outcome]]:
    return Verifier(num_threads=3).verify(logits, rounds), Verifier(native=False).verify(logits, rounds)


def state_of(size: int, seed: int, **params: Any) -> SamplingState:
    return SamplingState(
        SamplingParams(seed=seed, max_tokens=None, **params),
        PROMPT + OUTPUT,
        len(PROMPT),
        size,
        tokenizer_size=size - 1,
    )


def drafted(
    target: torch.Tensor, state: SamplingState, rule: Rule, k: int, *, noise: float, g: torch.Generator
) -> tuple[tuple[int, ...], tuple[SparseRow, ...]]:
    """A chain of k tokens of a draft whose logits are the target's, row by row, and noise."""
    steps, rows = [], Rows.after([state])
    for i in range(k):
        logits = target[i : i + 1] + noise * torch.randn(1, target.shape[1], generator=g)
        steps.append(draft(logits, rows, [rule]))
        rows = rows.extended(steps[-1].token_ids)
    (chain,) = collect(steps, [k])
    return chain.token_ids, chain.q_rows


def step(size: int, kinds: list[tuple[dict[str, Any], Rule, int, bool, int | None]], seed: int) -> tuple[Any, ...]:
    """Logits and a round of each kind (parameters, rule, k, whether q is sent, logprobs); other rows lie between."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(k + 2 for _, _, k, _, _ in kinds), size, generator=g) * 3
    rounds, row = [], 1
    for i, (params, rule, k, send_q, logprobs) in enumerate(kinds):
        state = state_of(size, seed + i, **params)
        ids, q_rows = drafted(logits[row:], state, rule, k, noise=float(i % 3), g=g)
        ids = tuple(min(v, size - 2) for v in ids)  # a masked row may draft padding, which check_draft refuses
        q_rows = q_rows if send_q and all(v < size - 1 for v in ids) else ()
        rounds.append(Round(state, rule, row, ids, q_rows, logprobs))
        row += k + 2
    return logits, rounds


#: Shares of the tokens that masks allow; None: no masks.
shares = st.sampled_from([None, None, 0.0, 0.02, 0.5, 0.98, 1.0])


def masked(rounds: list[Round], allowed: list[float | None], seed: int) -> list[Round]:
    """The rounds, each with masks that allow this share of the tokens; spaces of 64 tokens are all alike."""
    generator = np.random.default_rng(seed)

    def words(r: Round, share: float) -> torch.Tensor:
        num_words = -(-r.state.num_tokens // 32) + 1
        shape = (len(r.draft_token_ids) + 1, num_words)
        bits = generator.random((*shape, 32)) < share
        bits[:, ::3] = generator.random((*shape, 1))[:, ::3] < share
        packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)[..., 0]
        return torch.from_numpy(packed)

    pairs = zip(rounds, allowed, strict=True)
    return [r if share is None else replace(r, masks=words(r, share)) for r, share in pairs]


kinds = st.tuples(
    st.tuples(shapes, edits, st.booleans()).map(lambda kind: {**kind[0], **(kind[1] if kind[2] else {})}),
    st.sampled_from(list(Rule)),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from([None, None, 0, 3]),
)


@settings(max_examples=60)
@given(st.sampled_from(SIZES), st.lists(st.tuples(kinds, shares), min_size=1, max_size=32), st.integers(0, 10**6))
def test_rounds_are_decided_as_torch_decides_them(size: int, chosen: list[Any], seed: int) -> None:
    logits, rounds = step(size, [kind for kind, _ in chosen], seed)
    rounds = masked(rounds, [share for _, share in chosen], seed)
    before = logits.clone()
    native, by_torch = both(logits, rounds)
    assert torch.equal(logits, before)
    assert [(o.num_accepted, o.token_ids) for o in native] == [(o.num_accepted, o.token_ids) for o in by_torch]
    assert [type(o.error) for o in native] == [type(o.error) for o in by_torch]
    for r, here, there in zip(rounds, native, by_torch, strict=True):
        assert str(here.error) == str(there.error)
        check_logprobs(r, here, there)


def check_logprobs(r: Round, here: Outcome, there: Outcome) -> None:
    """The committed tokens', if they are wanted, and the same on either side."""
    assert len(here.logprobs) == (0 if r.logprobs is None else len(here.token_ids))
    assert [p.token_id for p in here.logprobs] == list(here.token_ids[: len(here.logprobs)])
    for x, y in zip(here.logprobs, there.logprobs, strict=True):
        assert [(token_id, rank) for token_id, _, rank in x.all] == [(token_id, rank) for token_id, _, rank in y.all]
        assert [logprob for _, logprob, _ in x.all] == pytest.approx([logprob for _, logprob, _ in y.all])


@parametrize_pairwise(
    {
        "k": [0, 1, 3, 8],
        "params": [{}, {"top_p": 0.8}, {"top_k": 40}, {"temperature": 0.6}, {"presence_penalty": 1.0}],
        "rule": list(Rule),
    }
)
def test_thousands_of_rounds(k: int, params: dict[str, Any], rule: Rule) -> None:
    """Long runs of one kind, so that every outcome a chain can have is met."""
    native, by_torch = both(*step(400, [(params, rule, k, True, None)] * 60, k))
    assert native == by_torch
    if k and not params:
        assert len({o.num_accepted for o in native}) > 1


@pytest.mark.parametrize("rule", list(Rule))
def test_a_huge_vocabulary(rule: Rule) -> None:
    """Rows are shared by threads here; wherever a sum ends, the token is the same."""
    shared = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 1e-4}, {"temperature": 1.7, "top_p": 0.5}]
    native, by_torch = both(*step(128_256, [(params, rule, 3, True, None) for params in shared], 5))
    assert native == by_torch


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("size", [300, 5_003])
def test_what_masks_forbid_is_as_if_the_model_had_forbidden_it(rule: Rule, size: int) -> None:
    params = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 1e-3}, {"presence_penalty": 1.0}]
    logits, rounds = step(size, [(each, rule, 3, True, None) for each in params for _ in range(4)], 9)
    rounds = masked(rounds, [0.0005, 0.02, 0.5, 0.999] * len(params), 9)
    written = logits.clone()
    for r in rounds:
        assert r.masks is not None
        allowed = np.unpackbits(r.masks.numpy().view(np.uint8), axis=-1, bitorder="little")[:, :size]
        written[r.start_row : r.start_row + 4].masked_fill_(torch.from_numpy(allowed) == 0, -torch.inf)
    assert not torch.equal(written, logits)
    with_masks = Verifier(num_threads=2).verify(logits, rounds)
    without = Verifier(num_threads=2).verify(written, [replace(r, masks=None) for r in rounds])
    # Where every token is forbidden, one says what a grammar may have to do with it.
    assert [(o.num_accepted, o.token_ids, str(o.error).partition(";")[0]) for o in with_masks] == [
        (o.num_accepted, o.token_ids, str(o.error)) for o in without
    ]
    assert {o.error.param for o in with_masks if isinstance(o.error, InvalidRequest)} == {"structured_outputs"}
    assert {o.error.param for o in without if isinstance(o.error, InvalidRequest)} == {"allowed_token_ids"}


def test_the_number_of_threads_changes_nothing() -> None:
    logits, rounds = step(20_000, [({"temperature": t}, rule, 4, True, None) for rule in Rule for t in (0.0, 1.0)], 3)
    outcomes = [Verifier(num_threads=threads).verify(logits, rounds) for threads in (1, 2, 5) for _ in range(5)]
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_tokens_end_a_round(rule: Rule, temperature: float) -> None:
    """Masked out altogether or not finite, at every place of a chain; drafts that name what argmax makes of it."""
    for broken, error in ((-torch.inf, InvalidRequest), (torch.nan, InternalError), (torch.inf, InternalError)):
        for at in range(4):
            states = [state_of(40, seed, temperature=temperature) for seed in range(20)]
            logits = torch.randn(80, 40, generator=torch.Generator().manual_seed(at)) * 3
            logits[at::4] = broken
            best = logits[:, :39].nan_to_num().argmax(-1).tolist()
            rounds = [Round(s, rule, 4 * b, tuple(best[4 * b : 4 * b + 3])) for b, s in enumerate(states)]
            native, by_torch = both(logits, rounds)
            failed = [o for o in native if o.error is not None]
            assert all(isinstance(o.error, error) and f"position {9 + at}" in str(o.error) for o in failed)
            assert failed or at == 3
            if broken == -torch.inf:
                assert [(o.token_ids, str(o.error)) for o in native] == [(o.token_ids, str(o.error)) for o in by_torch]


@settings(max_examples=300)
@given(st.data())
def test_the_same_proposals_are_refused(data: st.DataObject) -> None:
    """Rows as they come and with bytes changed, cut off or appended: either both checks refuse or neither does."""
    size = data.draw(st.sampled_from([5, 64, 300, 5003]))
    k = data.draw(st.integers(0, 4))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    state = SamplingState(SamplingParams(seed=1, max_tokens=None), [1], 1, size)
    ids, q_rows = drafted(torch.randn(k + 1, size, generator=g), state, Rule.BLOCK, k, noise=1.0, g=g)
    rows = [bytearray(row.packed) for row in q_rows]
    for _ in range(data.draw(st.integers(0, 2)) if rows else 0):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, max(0, len(row) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "append"])):
            case "flip" if row:
                row[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del row[at:]
            case _:
                row += bytes(data.draw(st.lists(st.integers(0, 255), max_size=3)))
    if data.draw(st.booleans()) and ids:
        ids = (*ids[:-1], data.draw(st.sampled_from([-1, 0, size - 1, size, 2**63])))
    sent = tuple(SparseRow(bytes(row)) for row in rows)[: data.draw(st.sampled_from([k, k, k, k - 1, 0]))]

    def refusal() -> str | None:
        try:
            check_draft(ids, sent, size)
        except InvalidRequest as error:
            return str(error)
        return None

    here = refusal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: None)
        assert refusal() == here
