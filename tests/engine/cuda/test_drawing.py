"""Drafted tokens by the kernels of a GPU: those that torch draws, in few launches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import chains
from engine.cuda import choice_kernels, choices, drawing
from engine.cuda.drawing import draw
from engine.sampling.drafting import draft
from engine.sampling.rows import Rows
from engine.sampling.state import SamplingState
from specdec.params import SamplingParams
from specdec.rules import Rule
from tests.engine.cuda.launches import Counted, Launches
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
        assert found is not None
        assert (found.token_ids.dtype, found.token_ids.tolist()) == (torch.int64, wanted.token_ids.tolist())
        rows = rows.extended(found.token_ids)
    drawn = draw(torch.full((4, V), torch.nan, device=DEVICE), rows, rules)
    assert drawn is not None
    assert drawn.token_ids.tolist() == [0] * 4


@pytest.mark.parametrize(
    ("params", "rule"), [({}, Rule.BLOCK), ({"top_k": 4}, Rule.COUPLED), ({"presence_penalty": 1.0}, Rule.COUPLED)]
)
def test_what_needs_more_is_left_to_torch(params: dict[str, Any], rule: Rule) -> None:
    assert draw(torch.zeros(2, V, device=DEVICE), rows_of(DEVICE, {}, params), [Rule.COUPLED, rule]) is None


def test_greedy_drafts_are_one_launch_of_torch() -> None:
    meta, rule = torch.device("meta"), [Rule.BLOCK]
    with Watch():
        rows = rows_of(meta, {"temperature": 0.0})
    with Watch(), Launches("meta") as launches:
        assert draw(torch.empty(1, V, device=meta), rows, rule) is None
        draft(torch.empty(1, V, device=meta), rows, rule)
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
    drawing._is_right.cache_clear()  # noqa: SLF001
    try:
        for _ in range(2):
            assert draw(torch.zeros(1, V, device=DEVICE), rows_of(DEVICE, {}), [Rule.COUPLED]) is None
    finally:
        drawing._is_right.cache_clear()  # noqa: SLF001
    assert caplog.text.count(text) == 1


def test_launches_of_a_drafted_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a coupled chain, its next rows not counted."""
    meta = torch.device("meta")
    logits, counts = torch.empty(1, V, device=meta), []
    with Watch():
        rows = rows_of(meta, {})
    monkeypatch.setattr(drawing, "_is_right", lambda device: True)
    for way in (draft, draw):
        launches = Launches("meta")
        for name in ("choose", "walk"):
            monkeypatch.setattr(choice_kernels, name, Counted(name, launches))
        with Watch() as watch, launches:
            way(logits, rows, [Rule.COUPLED])
        assert watch.num_fetched == 0
        counts.append(launches.counts.total())
    assert counts == [38, 4]


def test_chains_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "draw", lambda *_: "drawn")
    monkeypatch.setattr(chains, "draft", lambda *_: "by torch")
    on_gpu, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    assert [chains._drawn(logits, None, ()) for logits in (on_gpu, on_cpu)] == ["drawn", "by torch"]  # type: ignore[arg-type,comparison-overlap]  # noqa: SLF001
