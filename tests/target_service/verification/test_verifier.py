"""The verifier with real states, drafts and noise: identity of texts, mixed batches, log-probabilities and failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.native import library
from engine.sampling import distribution
from engine.sampling.drafting import collect, draft
from engine.sampling.edits import edited
from engine.sampling.noise import Stream, number
from engine.sampling.rows import Rows
from engine.sampling.sparse import pack, unpack
from engine.sampling.state import SamplingState
from specdec.errors import InternalError, InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule, SparseRow
from target_service.verification import tensor_verifier
from target_service.verification.logprobs import position_logprobs
from target_service.verification.rounds import Outcome, Round, check_draft
from target_service.verification.tensor_verifier import verify_with_tensors
from target_service.verification.verifier import Verifier, decide_many

V, PROMPT = 48, [3, 1, 4]
VERIFIER = Verifier()


pytestmark = pytest.mark.usefixtures("one_thread", "kernels")


@pytest.fixture(autouse=True, params=["native", "torch"])
def verifier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds for the kernels and for the rules on tensors."""
    if request.param == "torch":
        monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(sys.modules[__name__], "VERIFIER", Verifier())


class Model:
    """Logits from the last two tokens; a draft is the same with noise, or negated."""

    def __init__(self, num_tokens: int = V, noise: float = 0.0, sign: float = 1.0) -> None:
        g = torch.Generator().manual_seed(1)
        self.one = torch.randn(num_tokens, num_tokens, generator=g) * 2 * sign
        self.two = torch.randn(num_tokens, num_tokens, generator=g) * sign
        self.one += noise * torch.randn(num_tokens, num_tokens, generator=g)

    def __call__(self, contexts: Sequence[Sequence[int]]) -> Tensor:
        last, before = torch.tensor([c[-1] for c in contexts]), torch.tensor([c[-2] for c in contexts])
        return self.one[last] + self.two[before]


Drafter = Callable[[list[SamplingState], list[Rule], int], list[tuple[tuple[int, ...], tuple[SparseRow, ...]]]]


def model_drafter(model: Model) -> Drafter:
    def run(states: list[SamplingState], rules: list[Rule], k: int) -> Any:
        rows, steps = Rows.after(states), []
        for _ in range(k):
            prefixes = rows.prefix.tolist()
            steps.append(draft(model([s.token_ids + x for s, x in zip(states, prefixes, strict=True)]), rows, rules))
            rows = rows.extended(steps[-1].token_ids)
        return [(c.token_ids, c.q_rows) for c in collect(steps, [k] * len(states))]

    return run


def echo_drafter(states: list[SamplingState], rules: list[Rule], k: int) -> Any:
    """Deterministic, as n-gram drafts are: repeats what followed the last token's previous occurrence; ragged."""
    out = []
    for state in states:
        ids = state.token_ids
        at = next((i for i in range(len(ids) - 2, -1, -1) if ids[i] == ids[-1]), None)
        out.append((tuple(ids[at + 1 : at + 1 + k]) if at is not None else (), ()))
    return out


DRAFTERS: dict[str, Drafter] = {
    "aligned": model_drafter(Model(noise=0.5)),
    "adversarial": model_drafter(Model(sign=-1)),
    "echo": echo_drafter,
}


def generate(
    params: list[SamplingParams],
    rules: list[Rule],
    k: int,
    drafter: Drafter,
    *,
    length: int = 30,
    model: Model | None = None,
) -> list[list[int]]:
    """Decode all sessions together until each has ``length`` tokens after the prompt."""
    model = model or Model()
    num_tokens = model.one.shape[0]
    states = [SamplingState(p, PROMPT, len(PROMPT), num_tokens) for p in params]
    while active := [i for i, s in enumerate(states) if s.num_output_tokens < length]:
        proposals = drafter([states[i] for i in active], [rules[i] for i in active], k)
        contexts, rounds = [], []
        for i, (ids, q_rows) in zip(active, proposals, strict=True):
            check_draft(ids, q_rows, num_tokens)
            rounds.append(Round(states[i], rules[i], len(contexts), ids, q_rows))
            contexts += [[*states[i].token_ids, *ids[:n]] for n in range(len(ids) + 1)]
        for r, outcome in zip(rounds, VERIFIER.verify(model(contexts), rounds), strict=True):
            assert outcome.error is None
            assert outcome.token_ids[: outcome.num_accepted] == tuple(r.draft_token_ids[: outcome.num_accepted])
            r.state.commit(outcome.token_ids)
    return [s.token_ids[len(PROMPT) :][:length] for s in states]


TRANSFORMS: list[dict[str, Any]] = [
    {},
    {"top_k": 6},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.95},
    {"bad_token_ids": [[5], [7, 9], [9, 7]], "logit_bias": {7: 3.0, 9: 3.0}},
    {"min_tokens": 12, "stop_token_ids": [2, 11], "logit_bias": {2: 4.0}},
    {"allowed_token_ids": list(range(0, V, 2))},
]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_text_is_a_function_of_seed_and_target(drafter: str) -> None:
    """The same with speculation on or off, any k, any drafter, every transform, alone or in a batch."""
    params = [SamplingParams(seed=7 * i, **t) for i, t in enumerate(TRANSFORMS)]
    rules = [Rule.COUPLED] * len(params)
    plain = generate(params, rules, 0, DRAFTERS[drafter])
    for k in (1, 3, 8):
        assert generate(params, rules, k, DRAFTERS[drafter]) == plain
    assert generate(params[2:3], rules[:1], 3, DRAFTERS[drafter]) == plain[2:3]
    other = generate([p.with_seed(99) for p in params], rules, 0, DRAFTERS[drafter])
    assert all(a != b for a, b in zip(other, plain, strict=True))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_argmax_under_every_rule(drafter: str) -> None:
    model = Model()
    params = [SamplingParams(seed=0, **{**t, "temperature": 0.0}) for t in TRANSFORMS]
    wanted = []
    for p in params:
        state = SamplingState(p, PROMPT, len(PROMPT), V)
        for _ in range(30):
            state.commit([int(edited(model([state.token_ids]), Rows.after([state])).argmax())])
        wanted.append(state.token_ids[len(PROMPT) :])
    for rule in Rule:
        for k in (0, 1, 3, 8):
            assert generate(params, [rule] * len(params), k, DRAFTERS[drafter], model=model) == wanted


def test_plain_sampling_is_the_exponential_race() -> None:
    """k = 0 under coupled: argmin E_v / p_v, written out with the host's noise."""
    model = Model()
    state = SamplingState(SamplingParams(seed=123, temperature=0.7), PROMPT, len(PROMPT), V)
    logits = model([state.token_ids])
    p = (logits[0].double() / 0.7).softmax(-1).numpy()
    key = state.noise_key(Stream.COUPLING, len(PROMPT))
    clocks = [-np.log(number(key, v)) / p[v] for v in range(V)]
    (outcome,) = VERIFIER.verify(logits, [Round(state, Rule.COUPLED, 0)])
    assert outcome.token_ids == (int(np.argmin(clocks)),)


def fit(rule: Rule, tamper: Callable[[SparseRow], SparseRow] | None = None) -> float:
    """p-value of the pairs at positions 2 and 3 over 6000 seeds, end to end, V = 8."""
    num_tokens = 8
    model, draft_model = Model(num_tokens), model_drafter(Model(num_tokens, noise=1.0))

    def drafter(states: list[SamplingState], rules: list[Rule], k: int) -> Any:
        drafted = draft_model(states, rules, k)
        return drafted if tamper is None else [(ids, tuple(map(tamper, q))) for ids, q in drafted]

    count = 6000
    texts = np.array(
        generate([SamplingParams(seed=i) for i in range(count)], [rule] * count, 2, drafter, length=3, model=model)
    )
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        law = {
            (*x, v): mass * p
            for x, mass in law.items()
            for v, p in enumerate(model([PROMPT + list(x)])[0].double().softmax(-1).tolist())
        }
    expected = np.array(list(law.values())) * count
    counts = np.bincount(texts @ [num_tokens**2, num_tokens, 1], minlength=num_tokens**3)
    rare = expected < 5
    return float(
        stats.chisquare(
            np.append(counts[~rare], counts[rare].sum()),
            np.append(expected[~rare], expected[rare].sum()),
            sum_check=False,
        ).pvalue
    )


@pytest.mark.parametrize("rule", list(Rule))
def test_sampled_text_has_the_targets_distribution_end_to_end(rule: Rule) -> None:
    assert fit(rule) > 1e-3


def test_a_tampered_q_is_caught_end_to_end() -> None:
    """The planted twin: q sent flatter than q drawn from."""

    def flatter(row: SparseRow) -> SparseRow:
        ids, weights = unpack(row)
        return pack(ids, (np.cbrt(weights).round().astype(int) + 62) // 2)

    assert fit(Rule.BLOCK, flatter) < 1e-9


def mixed_rounds() -> tuple[Tensor, list[Round]]:
    rounds: list[Round] = []
    row = 3  # rows of others, such as prefill chunks, lie between
    drafter = DRAFTERS["aligned"]
    for i, t in enumerate([*TRANSFORMS, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 1.0}]):
        for rule in Rule:
            state = SamplingState(SamplingParams(seed=i, **t), PROMPT, len(PROMPT), V)
            ((ids, q_rows),) = drafter([state], [rule], i % 4)
            rounds.append(Round(state, rule, row, ids, q_rows if i % 2 else (), logprobs=i % 3 if i % 5 else None))
            row += len(ids) + 2
    return torch.randn(row, V, generator=torch.Generator().manual_seed(3)) * 3, rounds


def test_a_mixed_step_decides_as_each_round_alone() -> None:
    logits, rounds = mixed_rounds()
    before = logits.clone()
    together = VERIFIER.verify(logits, rounds)
    assert torch.equal(logits, before)
    for r, outcome in zip(rounds, together, strict=True):
        alone = VERIFIER.verify(logits, [r])[0]
        assert (alone.num_accepted, alone.token_ids, alone.error) == (outcome.num_accepted, outcome.token_ids, None)
        assert len(alone.logprobs) == len(outcome.logprobs) == (0 if r.logprobs is None else len(outcome.token_ids))


class LargestTensor(TorchDispatchMode):
    """Notes the most rows over the vocabulary in a tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, Tensor) and part.ndim > 1 and part.shape[-1] == V:
                self.num_rows = max(self.num_rows, part.numel() // V)
        return made


def test_many_rounds_are_decided_in_parts_with_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rounds = mixed_rounds()
    wanted = verify_with_tensors(logits, rounds)
    many = torch.randn(83, V)
    found = []
    for count in (1000, 10):
        monkeypatch.setattr(tensor_verifier, "MAX_NUMBERS", count * V)
        assert verify_with_tensors(logits, rounds) == wanted
        with LargestTensor() as largest:
            decide_many(many)
        found.append(largest.num_rows)
    assert found == [83, 10]


def test_rounds_whose_survivors_are_many_are_decided_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a distribution may lack tokens."""
    logits, rounds = mixed_rounds()
    wanted = VERIFIER.verify(logits, rounds)
    decided: list[int] = []
    verify = tensor_verifier.verify_with_tensors

    def watched(logits: Tensor, rounds: Sequence[Round], *, exact: bool = False) -> list[Outcome]:
        decided.append(len(rounds))
        return verify(logits, rounds, exact=exact)

    monkeypatch.setattr(tensor_verifier, "verify_with_tensors", watched)
    monkeypatch.setattr(distribution, "_counts_survivors", lambda logits: False)
    monkeypatch.setattr(distribution, "NUM_CANDIDATES", 4)
    found = watched(logits, rounds)
    assert [(o.num_accepted, o.token_ids, o.path) for o in found] == [
        (o.num_accepted, o.token_ids, o.path) for o in wanted
    ]
    assert 0 < decided[1] < decided[0]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    state = SamplingState(SamplingParams(seed=5, top_k=3, logit_bias={7: 9.0}), PROMPT, 3, V, tokenizer_size=40)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 45] = 30.0  # a padded id: counts in the normalisation, is never drawn nor reported
    ids = (7, 7, 9)
    (outcome,) = VERIFIER.verify(logits, [Round(state, Rule.COUPLED, 0, ids, logprobs=4)])
    reference = logits.log_softmax(-1)
    assert len(outcome.logprobs) == len(outcome.token_ids)
    for row, token_id, entry in zip(reference, outcome.token_ids, outcome.logprobs, strict=False):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-6)
        assert entry.rank == int((row[:40] > row[token_id]).sum()) + 1
        top = row[:40].topk(4)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-6)
        assert [rank for _, _, rank in entry.all] == [1, 2, 3, 4, entry.rank]
    again = position_logprobs(logits[: len(outcome.token_ids)], outcome.token_ids, 4, 40)
    assert again == list(outcome.logprobs)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_session_left_without_tokens_fails_alone(rule: Rule, temperature: float, top_p: float) -> None:
    """Only [4, 6] and [4, 8] are left after 4, and both are forbidden sequences."""
    params = SamplingParams(
        seed=1, temperature=temperature, top_p=top_p, allowed_token_ids=[6, 8], bad_token_ids=[[4, 6], [4, 8]]
    )
    stuck = SamplingState(params, PROMPT, len(PROMPT), V)
    fine = SamplingState(SamplingParams(seed=1, temperature=temperature, top_p=top_p), PROMPT, len(PROMPT), V)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    failed, good = VERIFIER.verify(logits, [Round(stuck, rule, 0, (6,)), Round(fine, rule, 2, (6,))])
    assert isinstance(failed.error, InvalidRequest)
    assert "position 3" in str(failed.error)
    assert failed.token_ids == ()
    assert good == VERIFIER.verify(logits[2:], [Round(fine, rule, 0, (6,))])[0]
    assert isinstance(VERIFIER.verify(logits[:1], [Round(stuck, rule, 0)])[0].error, InvalidRequest)
    assert good.error is None


def test_a_grammar_that_allows_no_token_may_be_too_large() -> None:
    state = SamplingState(SamplingParams(seed=1), PROMPT, len(PROMPT), V)
    masks = torch.zeros(1, (V + 31) // 32, dtype=torch.int32)
    (failed,) = VERIFIER.verify(torch.zeros(1, V), [Round(state, Rule.TOKEN, 0, masks=masks)])
    assert isinstance(failed.error, InvalidRequest)
    assert "too large to be followed: simplify it" in str(failed.error)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_our_fault(rule: Rule, temperature: float) -> None:
    state = SamplingState(SamplingParams(seed=1, temperature=temperature), PROMPT, len(PROMPT), V)
    (outcome,) = VERIFIER.verify(torch.full((2, V), torch.nan), [Round(state, rule, 0, (1,), logprobs=1)])
    assert isinstance(outcome.error, InternalError)


def test_an_unreachable_row_may_have_no_tokens() -> None:
    """A chain runs into a dead end behind a token the target rejects: nothing of it shows."""
    for rule in Rule:
        state = SamplingState(SamplingParams(seed=1, bad_token_ids=[[9]]), PROMPT, len(PROMPT), V)
        logits = torch.randn(3, V, generator=torch.Generator().manual_seed(0))
        logits[1:] = -torch.inf
        (outcome,) = VERIFIER.verify(logits, [Round(state, rule, 0, (9, 5))])
        assert outcome.error is None
        assert outcome.num_accepted == 0


def test_padded_ids_are_never_drawn() -> None:
    for rule in Rule:
        for temperature in (0.0, 1.0, 50.0):
            state = SamplingState(SamplingParams(seed=1, temperature=temperature), PROMPT, 3, V, tokenizer_size=30)
            logits = torch.zeros(4, V)
            logits[:, 30:] = 50.0
            (outcome,) = VERIFIER.verify(logits, [Round(state, rule, 0, (1, 2, 3))])
            assert max(outcome.token_ids) < 30


def test_an_empty_step() -> None:
    assert VERIFIER.verify(torch.zeros(0, V), []) == []


def row_of(*token_ids: int) -> SparseRow:
    return pack(np.array(token_ids), np.arange(len(token_ids)))


@pytest.mark.parametrize(
    ("ids", "q_rows"),
    [
        ((V,), ()),
        ((-1,), ()),
        ((1, 2), (row_of(1),)),
        ((1,), (row_of(2),)),
        ((1,), (row_of(1, V),)),
        ((1,), (SparseRow(b""),)),
        ((1,), (SparseRow(row_of(1, 2).packed[:-1]),)),
    ],
)
def test_malformed_proposals_are_refused(ids: tuple[int, ...], q_rows: tuple[SparseRow, ...]) -> None:
    with pytest.raises(InvalidRequest):
        check_draft(ids, q_rows, V)


def test_well_formed_proposals_pass() -> None:
    check_draft((), (), V)
    check_draft((1, 2), (), V)
    check_draft((1, 2), (row_of(1), row_of(3, 2, 0, V - 1)), V)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_decides_as_the_cpu() -> None:
    logits, rounds = mixed_rounds()
    here: list[Outcome] = VERIFIER.verify(logits, rounds)
    there = VERIFIER.verify(
        logits.cuda(),
        [
            Round(
                SamplingState(r.state.params, PROMPT, len(PROMPT), V, device="cuda"),
                r.rule,
                r.start_row,
                r.draft_token_ids,
                r.q_rows,
            )
            for r in rounds
        ],
    )
    assert [(o.num_accepted, o.token_ids) for o in here] == [(o.num_accepted, o.token_ids) for o in there]
