"""Drafted tokens by the kernels of a GPU: those that torch draws, in few launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import chains
from engine.cuda import choice_kernels, choices, drawing, graphs
from engine.cuda.drawing import CapturedDraws, DrawShape, draw, draws_of
from engine.cuda.graphs import CudaCapture
from engine.cuda.sync import NoSync
from engine.sampling.candidates import candidates
from engine.sampling.drafting import collect, draft, draft_alike
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import DraftSampling, Rule
from tests.engine.cuda.launches import Counted, Launches, rerun
from tests.engine.cuda.test_rounds import Watch

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
V = 2500


def rows_of(device: torch.device, *params: dict[str, Any]) -> Rows:
    return Rows.after(
        [SamplingState(SamplingParams(seed=i, **own), [1, 2], 2, V, device=device) for i, own in enumerate(params)]
    )


def test_they_draw_as_torch_does() -> None:
    """Step after step, greedy and coupled rows beside each other; a row that is no number has a token, too."""
    rows = rows_of(DEVICE, {"temperature": 0.0}, {}, {"temperature": 0.4}, {"temperature": 0.0, "top_p": 0.5})
    rules = [Rule.BLOCK, Rule.COUPLED, Rule.COUPLED, Rule.TOKEN]
    for step in range(3):
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        found, wanted = draw(logits, rows, rules), draft(logits, rows, rules)
        assert (found.token_ids.dtype, found.token_ids.tolist()) == (torch.int64, wanted.token_ids.tolist())
        rows = rows.extended(found.token_ids)
    drawn = draw(torch.full((4, V), torch.nan, device=DEVICE), rows, rules)
    assert drawn.token_ids.tolist() == [0] * 4


KINDS = [
    (Rule.BLOCK, ({}, {"temperature": 0.4}, {})),
    (Rule.TOKEN, ({"top_p": 0.8}, {"top_k": 4}, {}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.5})),
    (Rule.COUPLED, ({"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.1})),
]


def replaying(device: torch.device = DEVICE) -> CapturedDraws:
    """Where there is no GPU, a "graph" is the captured function run again."""
    return CapturedDraws(CudaCapture(device, of_verdicts=True) if device.type == "cuda" else rerun, device)


@pytest.mark.parametrize(("rule", "params"), KINDS)
def test_replayed_draws_are_torchs(rule: Rule, params: Sequence[dict[str, Any]]) -> None:
    """Batch after batch on the same memory, padded; equal logits, rows that have no token to draw, and such that are no
    numbers.
    """
    draws = replaying()
    for step, count in enumerate((len(params), 1, len(params))):
        rows = rows_of(DEVICE, *params[:count]).extended(torch.arange(count, device=DEVICE))
        logits = 3 * torch.randn(count, V, generator=torch.Generator().manual_seed(step)).bfloat16().float()
        logits[-1, : V // 2] = -torch.inf
        draws._logits.fill_((0.0, torch.nan, -torch.inf)[step])  # noqa: SLF001 - what others have left
        if step == 2:
            logits[0], logits[1, 7] = -torch.inf, torch.nan
        found, wanted = (way(rule.sampling, logits.to(DEVICE), rows) for way in (draws.draw, draft_alike))
        assert found.token_ids[2 * (step == 2) :].tolist() == wanted.token_ids[2 * (step == 2) :].tolist()
        if rule.sampling.sends_q:
            assert collect([found], None)[count - 1] == collect([wanted], None)[count - 1]
    assert {shape.num_rows for shape in draws.shapes} == {1, 2, 4, 8, 16}, "captured at the first draw"


@pytest.mark.parametrize(("rule", "params"), [*KINDS, (Rule.COUPLED, ({}, {"temperature": 0.4}, {}))])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_candidates_of_trees_are_torchs(rule: Rule, params: Sequence[dict[str, Any]], is_greedy: bool) -> None:
    """Batch after batch on the same memory, padded; a row of few tokens, and on the second call what was checked."""
    draws = replaying()
    for step, count in enumerate((len(params), 1, len(params))):
        rows = rows_of(DEVICE, *({"temperature": 0.0} if is_greedy else own for own in params[:count]))
        logits = 3 * torch.randn(count, V, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        logits[-1, 2:] = -torch.inf
        draws._logits.fill_((0.0, torch.nan, -torch.inf)[step])  # noqa: SLF001 - what others have left
        found, wanted = (candidates(logits, rows, [rule] * count, 5, way) for way in (draws.find, None))
        real = wanted[1] > -torch.inf
        assert torch.equal(found[0][real], wanted[0][real])
        torch.testing.assert_close(found[1], wanted[1])
    assert draws.shapes
    assert set(draws._checked) <= set(draws.shapes), "they are alike"  # noqa: SLF001


@pytest.mark.parametrize("params", [{"top_k": 400}, {"temperature": 0.5}])
def test_what_no_shape_holds_is_left_to_torch(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a row of q names, more logits than are drawn from together."""
    draws, rows, logits = replaying(), rows_of(DEVICE, params, params), torch.randn(2, V).to(DEVICE)
    monkeypatch.setattr(drawing, "MAX_NUMBERS", 2 * V - ("top_k" not in params))
    found, wanted = (way(DraftSampling.FROM_Q, logits, rows) for way in (draws.draw, draft_alike))
    assert not draws.shapes
    assert found.token_ids.tolist() == wanted.token_ids.tolist()


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("fault", ["wrong", "broken", "uncompiled", "full"])
def test_graphs_that_fail_are_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(run: Callable[[], object]) -> Callable[[], object] | None:
        if fault == "broken":
            raise RuntimeError("operation not permitted when stream is capturing")
        if fault == "uncompiled":
            raise CompilationError
        return None if fault == "full" else lambda: None

    draws, rows, logits = CapturedDraws(capture, DEVICE), rows_of(DEVICE, {}), torch.randn(1, V).to(DEVICE)
    for _ in range(2):
        found, wanted = (way(DraftSampling.FROM_Q, logits, rows) for way in (draws.draw, draft_alike))
        assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert DrawShape(DraftSampling.FROM_Q, False, 1, V) not in draws.shapes


def test_rows_of_all_kinds_are_drawn_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them after edits."""
    draws = replaying()
    monkeypatch.setattr(drawing, "draws_of", lambda device: draws)
    given = [(own, rule) for rule, params in KINDS for own in params]
    given += [({"temperature": 0.0}, Rule.BLOCK), ({}, Rule.COUPLED), ({"logit_bias": {5: 9.0}}, Rule.COUPLED)]
    rows, rules = rows_of(DEVICE, *(own for own, _ in given)), [rule for _, rule in given]
    logits = torch.randn(len(given), V, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert collect([draw(logits, rows, rules)]) == collect([draft(logits, rows, rules)])
    assert len(draws._checked) == 2  # noqa: SLF001 - kinds that were drawn by them


def test_each_thread_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on its stream, and share memory that one draw after another uses."""
    monkeypatch.setattr(drawing, "CudaCapture", lambda *_, **__: rerun)
    found = [draws_of(DEVICE), draws_of(DEVICE)]
    thread = threading.Thread(target=lambda: found.append(draws_of(DEVICE)))
    thread.start()
    thread.join()
    assert found[0] is found[1] is not found[2]


def test_eager_threads_draw_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``--enforce-eager`` wants; other threads go on."""
    monkeypatch.setattr(drawing, "CudaCapture", lambda *_, **__: rerun)
    rows, rules, logits = rows_of(DEVICE, {"top_p": 0.8}), [Rule.BLOCK], torch.randn(1, V).to(DEVICE)
    found, shapes = [], []

    def work(is_eager: bool) -> None:
        graphs.set_eager(is_eager)
        found.append(collect([draw(logits, rows, rules)]))
        shapes.append(len(draws_of(DEVICE).shapes))

    for is_eager in (True, False):
        thread = threading.Thread(target=work, args=(is_eager,))
        thread.start()
        thread.join()
    assert (found[0], shapes[0] == 0, shapes[1] > 0) == (found[1], True, True)


@pytest.mark.parametrize("is_eager", [True, False])
def test_a_thread_is_as_its_model_was_loaded(is_eager: bool, load_engine: Callable[..., Any]) -> None:
    load_engine("llama", enforce_eager=is_eager)
    assert graphs.is_eager() is is_eager


def test_greedy_drafts_are_one_launch_of_torch() -> None:
    meta, rule = torch.device("meta"), [Rule.BLOCK]
    with Watch():
        rows = rows_of(meta, {"temperature": 0.0})
    with Watch(), Launches("meta") as launches:
        draw(torch.empty(1, V, device=meta), rows, rule)
    assert launches.counts == {"argmax": 1}


@pytest.mark.parametrize(("fault", "text"), [("wrong", "they draw other tokens"), ("broken", "CompilationError: no")])
def test_kernels_that_fail_are_not_used(
    fault: str, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class CompilationError(Exception):
        pass

    def walk(logits: torch.Tensor, walks: Any, num_tokens: int) -> torch.Tensor:
        if fault == "broken":
            raise CompilationError("no such instruction")
        return logits.new_zeros(3, len(walks), dtype=torch.float64)

    monkeypatch.setattr(choices, "walk", walk)
    draws = replaying()
    monkeypatch.setattr(drawing, "draws_of", lambda device: draws)
    drawing._is_right.cache_clear()  # noqa: SLF001
    rows, rules, logits = rows_of(DEVICE, {}), [Rule.COUPLED], torch.randn(1, V).to(DEVICE)
    try:
        for _ in range(2):
            assert draw(logits, rows, rules).token_ids.tolist() == draft(logits, rows, rules).token_ids.tolist()
    finally:
        drawing._is_right.cache_clear()  # noqa: SLF001
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize(
    ("rule", "params", "before", "after"),
    [
        (Rule.COUPLED, {}, 38, 4),
        (Rule.COUPLED, {"top_p": 0.9}, 74, 4),
        (Rule.BLOCK, {}, 53, 4),
        (Rule.BLOCK, {"top_p": 0.9}, 72, 4),
        (Rule.BLOCK, {"top_p": 0.9, "logit_bias": {5: 1.0}}, 79, 9),
    ],
)
def test_launches_of_a_drafted_token(
    rule: Rule, params: dict[str, Any], before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next rows not counted."""
    meta, launches = torch.device("meta"), Launches("meta")
    logits, counts = torch.empty(1, V, device=meta), []
    with Watch():
        rows = rows_of(meta, params)

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        with NoSync("meta"):
            run()
        return lambda: launches.counts.update(["replay"])

    draws = CapturedDraws(capture, meta)
    monkeypatch.setattr(drawing, "draws_of", lambda device: draws)
    monkeypatch.setattr(drawing, "_equal", lambda *_: True)
    monkeypatch.setattr(drawing, "_is_right", lambda device: True)
    for name in ("choose", "walk", "weigh"):
        monkeypatch.setattr(choice_kernels, name, Counted(name, launches))
    for way in (draft, draw, draw):  # the second captures
        with Watch() as watch, launches:
            launches.counts.clear()
            way(logits, rows, [rule])
        assert watch.num_fetched == 0
        counts.append(launches.counts.total())
    assert [counts[0], counts[2]] == [before, after]


@pytest.mark.parametrize(
    ("rule", "params", "before", "after"),
    [(Rule.BLOCK, {"temperature": 0.0}, 4, 4), (Rule.COUPLED, {}, 43, 4), (Rule.BLOCK, {"top_p": 0.9}, 55, 4)],
)
def test_launches_of_a_trees_level(
    rule: Rule, params: dict[str, Any], before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its candidates: on 8 rows at 128,256 tokens, before their copy to the host."""
    meta, launches = torch.device("meta"), Launches("meta")
    logits, counts = torch.empty(8, 128_256, device=meta), []
    with Watch():
        rows = Rows.after([SamplingState(SamplingParams(seed=0, **params), [1], 1, 128_256, device=meta)] * 8)

    def capture(run: Callable[[], object]) -> Callable[[], object]:
        with NoSync("meta", captures=True):
            run()
        return lambda: launches.counts.update(["replay"])

    draws = CapturedDraws(capture, meta)
    monkeypatch.setattr(drawing, "_are_alike", lambda *_: True)
    monkeypatch.setattr(choice_kernels, "weigh", Counted("weigh", launches))
    for way in (None, draws.find, draws.find):  # the second captures
        with Watch() as watch, launches:
            launches.counts.clear()
            candidates(logits, rows, [rule] * 8, 4, way)
        assert watch.num_fetched == 0
        counts.append(launches.counts.total())
    assert [counts[0], counts[2]] == [before, after]


@pytest.mark.parametrize(
    ("sampling", "truncates", "before", "after"),
    [
        (DraftSampling.FROM_Q, False, 99, 11),
        (DraftSampling.FROM_Q, True, 169, 16),
        (DraftSampling.SHARED_NOISE, True, 84, 19),
    ],
)
def test_bytes_of_drafted_tokens(
    sampling: DraftSampling, truncates: bool, before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MB that a token of each of eight sessions reads and writes beside the logits' 4.1, at 128,256 tokens."""
    meta, num_tokens, found = torch.device("meta"), 128_256, []
    params = SamplingParams(seed=0, top_p=0.9 if truncates else 1.0)
    with Watch():
        rows = Rows.after([SamplingState(params, [1, 2], 2, num_tokens, device=meta)] * 8)
    shape, logits = drawing.DrawShape(sampling, truncates, 8, num_tokens), torch.empty(8, num_tokens, device=meta)
    numbers, out = (torch.empty(size, dtype=torch.int64, device=meta) for size in ((5, 8), (8, 1 + 2 * shape.q_width)))
    for way in (
        lambda: draft_alike(sampling, logits, rows),
        lambda: drawing.compute(shape, logits, numbers, out),
    ):
        launches = Launches("meta")
        monkeypatch.setattr(choice_kernels, "weigh", Counted("weigh", launches))
        with Watch(), launches:
            way()
        found.append(round(launches.num_bytes / 1e6))
    assert found == [before, after]


def test_chains_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw", lambda *_: "drawn")
    monkeypatch.setattr(chains, "draft", lambda *_: "by torch")
    on_gpu, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    assert [chains.drawn(logits, None, ()) for logits in (on_gpu, on_cpu)] == ["drawn", "by torch"]  # type: ignore[arg-type,comparison-overlap]
