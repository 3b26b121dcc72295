"""Greedy and coupled verdicts by the kernels of a GPU: as tensors decide, and faults are seen at start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cuda import choice_kernels, choices, graphs
from engine.cuda.sync import NoSync
from engine.native import library
from engine.sampling import distribution
from engine.sampling.distribution import untruncated
from engine.sampling.sparse import pack
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from target_service.verification import captured, verifier
from target_service.verification.captured import GpuVerdicts, Kind
from target_service.verification.rounds import Round
from target_service.verification.tensor_verifier import verify_with_tensors
from target_service.verification.verifier import Verifier, checked
from tests.engine.cuda.launches import Counted, Launches
from tests.engine.paged import random_tree

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
V = 2500  # two parts
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 0.0, "top_p": 0.5},
    {"top_k": 5},
    {"presence_penalty": 1.0},
]


def rounds_of(generator: torch.Generator) -> list[Round]:
    """Every rule and kind of parameters, beside each other; drafts are among few tokens, and so sometimes chosen."""
    rounds, row = [], 0
    for i, params in enumerate(PARAMS * 3):
        count = int(torch.randint(5, (1,), generator=generator))
        state = SamplingState(SamplingParams(seed=i, **params), [1, 2], 2, V, tokenizer_size=V - 3, device=DEVICE)
        drafts = torch.randperm(4, generator=generator)[:count].tolist()
        parents = tuple(random_tree(count, i)) if i % 2 and count else ()
        logprobs = 2 if i % 4 == 1 else None
        levels = torch.randint(64, (count, 4), generator=generator).numpy()
        has_q = i % 4 >= 2 and i < 2 * len(PARAMS)
        num_q = len(set(parents)) if parents else count
        q_rows = tuple(pack(np.arange(4), own) for own in levels[:num_q]) if has_q else ()
        masks = None
        if i % 5 > 2:
            masks = torch.randint(-(2**31), 2**31, (count + 1, V // 32 + 1), generator=generator).int()
        rounds.append(Round(state, list(Rule)[i // len(PARAMS)], row, drafts, q_rows, logprobs, parents, masks=masks))
        row += count + 1
    return rounds


def rerun(run: Callable[[], object]) -> Callable[[], object]:
    """Stands in for a capture on a CPU: a function that would wait for the device is refused, too."""
    with NoSync("cpu"):
        run()
    return run


def made(*, with_graphs: bool) -> GpuVerdicts:
    capture = graphs.CudaCapture(DEVICE, of_verdicts=True) if DEVICE.type == "cuda" else rerun
    return GpuVerdicts(choices, capture if with_graphs else None, DEVICE)


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_they_decide_as_tensors_do(seed: int, with_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "NUM_CANDIDATES", 64)
    generator = torch.Generator().manual_seed(seed)
    rounds = rounds_of(generator)
    logits = torch.randn(rounds[-1].start_row + 6, V, generator=generator)
    logits[:, :4] += 8
    logits[:, V - 3 :] += 100  # padding of the vocabulary is never chosen
    logits[3, 700], logits[rounds[6].start_row] = torch.nan, -torch.inf
    logits = logits.to(DEVICE)
    expected, on_gpu = verify_with_tensors(logits, rounds), made(with_graphs=with_graphs)
    assert sum(outcome.num_accepted > 0 for outcome in expected) > 2
    assert sum(outcome.error is not None for outcome in expected) > 0
    for _ in range(2):  # captured, replayed
        for ours, theirs in zip(verify_with_tensors(logits, rounds, on_gpu=on_gpu), expected, strict=True):
            assert (ours.path, ours.token_ids) == (theirs.path, theirs.token_ids)
            assert (ours.error is None) is (theirs.error is None)
            assert [(rank, token_id) for one in ours.logprobs for token_id, _, rank in one.all] == [
                (rank, token_id) for one in theirs.logprobs for token_id, _, rank in one.all
            ]
    kinds = {(shape.rule, shape.truncates) for shape in on_gpu.shapes}
    assert kinds == (
        {(rule, bool(x)) for rule in Rule for x in (0, 1)} - {(Rule.COUPLED, False)} if with_graphs else set()
    )
    assert {shape.num_siblings for shape in on_gpu.shapes} == ({0, 4} if with_graphs else set())
    assert all(on_gpu.kind(r) is not None for r in rounds) is with_graphs


def test_of_equal_logits_the_first_is_chosen() -> None:
    logits = torch.zeros(1, V, device=DEVICE)
    logits[0, 2100] = logits[0, 2300] = 1.0
    state = SamplingState(SamplingParams(temperature=0.0, seed=0), [1], 1, V, device=DEVICE)
    (outcome,) = verify_with_tensors(logits, [Round(state, Rule.BLOCK, 0)], on_gpu=made(with_graphs=False))
    assert outcome.token_ids == (2100,)


def test_rows_that_may_lack_tokens_are_decided_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat row of top-p has more survivors than candidates."""
    monkeypatch.setattr(distribution, "NUM_CANDIDATES", 64)
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    state = SamplingState(SamplingParams(top_p=0.99, seed=0), [1], 1, V, device=DEVICE)
    rounds = [Round(state, Rule.BLOCK, 0, (3, 4))]
    on_gpu = made(with_graphs=True)
    assert verify_with_tensors(logits, rounds, on_gpu=on_gpu) == verify_with_tensors(logits, rounds, exact=True)
    assert len(on_gpu.shapes) == 1


def test_more_rounds_than_a_graph_holds_take_several() -> None:
    logits = torch.randn(70, V, device=DEVICE)
    state = SamplingState(SamplingParams(seed=0), [1], 1, V, device=DEVICE)
    rounds, on_gpu = [Round(state, Rule.BLOCK, row) for row in range(70)], made(with_graphs=True)
    assert verify_with_tensors(logits, rounds, on_gpu=on_gpu) == verify_with_tensors(logits, rounds)
    assert [shape.num_rounds for shape in on_gpu.shapes] == [64, 8]


def test_without_memory_for_graphs_tensors_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, V, device=DEVICE)
    state = SamplingState(SamplingParams(seed=0), [1], 1, V, device=DEVICE)
    rounds, tried = [Round(state, Rule.BLOCK, row) for row in range(2)], []

    def full(run: Callable[[], object]) -> None:
        tried.append(run)
        if len(tried) > 1:
            raise torch.OutOfMemoryError("all of it")

    on_gpu = GpuVerdicts(None, full, DEVICE)
    for some in (rounds, rounds[:1], rounds, rounds[:1]):
        assert verify_with_tensors(logits, some, on_gpu=on_gpu) == verify_with_tensors(logits, some)
    assert len(tried) == 2
    monkeypatch.setattr(distribution, "MAX_NUMBERS", V)  # not one round fits
    assert GpuVerdicts(None, rerun, DEVICE).decide(Kind(Rule.BLOCK), logits, rounds) is None


class Faulty(GpuVerdicts):
    """Changes what it has decided."""

    def __init__(self, fault: Callable[[Tensor], object]) -> None:
        super().__init__(choices, None, DEVICE)
        self._fault = fault

    def decide(self, *given: Any) -> Tensor | None:
        decided = super().decide(*given)
        assert decided is not None
        self._fault(decided)
        return decided


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "one place too short": lambda out: out[0].sub_(1).clamp_(0),
    "another token": lambda out: out[1].add_(1),
    "all valid": lambda out: out[2].fill_(1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_at_start(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert checked(Faulty(FAULTS[name]), DEVICE, 50, 48) is None
    assert "verdicts run without kernels: they decide otherwise than tensors" in caplog.text


def test_what_is_right_passes_the_check_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # batches of other sizes would take seconds in the interpreter
        monkeypatch.setattr(verifier, "_WARM_ROUNDS", ())
    assert checked(made(with_graphs=True), DEVICE, 50, 48) is not None


def test_what_does_not_compile_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class CompilationError(Exception):
        pass

    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise CompilationError("no such instruction")

    monkeypatch.setattr(choice_kernels, "choose", Broken())
    assert checked(made(with_graphs=False), DEVICE, 50, 50) is None
    assert "CompilationError: no such instruction" in caplog.text


def test_a_verifier_uses_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU, whose name alone is asked; graphs are wrong, kernels are not."""
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(verifier, "CudaCapture", lambda *_, **__: rerun)
    monkeypatch.setattr(verifier, "checked", lambda on_gpu, *_: on_gpu if str(on_gpu) == "kernels" else None)
    used = []
    monkeypatch.setattr(GpuVerdicts, "decide", lambda self, *given: used.append(str(self)))
    state = SamplingState(SamplingParams(temperature=0.0, seed=0), [1], 1, V, device=DEVICE)
    logits, own = torch.randn(1, V, device=DEVICE), Verifier()
    before = own.verify(logits, [Round(state, Rule.BLOCK, 0)])
    assert not used
    own.warm_up(torch.device("cuda"), V, 0)
    assert own.verify(logits, [Round(state, Rule.BLOCK, 0)]) == before
    assert used == ["kernels"]


def test_a_verifier_need_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--enforce-eager`` no graph is made."""
    monkeypatch.setattr(verifier, "CudaCapture", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(verifier, "checked", lambda on_gpu, *_: on_gpu)
    own = Verifier()
    own.warm_up(torch.device("cuda"), V, 0, captures=False)
    assert str(own.on_gpu) == "kernels"


@pytest.mark.parametrize("min_p", [None, 0.3])
def test_tokens_weigh_what_torch_says(min_p: float | None) -> None:
    """A part of the columns of more rows; some without a token, some that are no numbers."""
    logits = 3 * torch.randn(5, V, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[1, 7], logits[2, 2100], logits[3], logits[4, : V // 2] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits = logits[:, : V - 3]
    temperature = torch.tensor([[0.1], [1.0], [1.0], [0.7], [2.0]], dtype=torch.float64, device=DEVICE)
    least = None if min_p is None else torch.full_like(temperature, min_p)
    top = logits.amax(-1, keepdim=True)
    pairs = [
        (choices.mass(logits, top, temperature, least), distribution._mass(logits, top, temperature, least)),  # noqa: SLF001
        (choices.weights(logits, top, temperature), distribution._weights(logits, top, temperature)),  # noqa: SLF001
    ]
    for found, wanted in pairs:
        torch.testing.assert_close(found[[0, 3, 4]], wanted[[0, 3, 4]], rtol=1e-12, atol=0)
        assert (found[[1, 2, 3]] == 0).all()
    assert untruncated(logits, temperature, choices).valid.tolist() == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("rule", "truncates", "before", "after"),
    [(Rule.COUPLED, True, 555, 93), (Rule.BLOCK, True, 664, 203), (Rule.BLOCK, False, 534, 287)],
)
def test_bytes_of_a_captured_verdict(
    rule: Rule, truncates: bool, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MB that eight rounds of four drafts read and write beside the logits' 21, at a vocabulary of 128,256."""
    meta, found = torch.device("meta"), []
    shape = captured.Shape(rule, truncates, 8, 4, 4, 128_256)
    for kernels in (None, choices):
        launches = Launches("meta")
        monkeypatch.setattr(choice_kernels, "weigh", Counted("weigh", launches))
        sizes = sum(int(np.prod(size)) for size in captured._sizes(shape))  # noqa: SLF001
        parts = captured._parts(torch.empty(sizes, dtype=torch.int64, device=meta), shape, torch.float64)  # noqa: SLF001
        logits, out = torch.empty(40, 128_256, device=meta), torch.empty(3, 8, dtype=torch.float64, device=meta)
        with launches:
            captured._compute(logits, parts, shape, out, kernels)  # noqa: SLF001
        found.append(round(launches.num_bytes / 1e6))
    assert found == [before, after]
