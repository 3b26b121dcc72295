"""Ranks of a split model use the same runner, although each of them tries its own."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import errors as triton_errors

from engine.loading.acceleration import choose_runner, runners
from specdec.errors import ModelNotSupported, Unavailable
from specdec.settings import ModelSettings

SETTINGS = ModelSettings(model="m", enforce_eager=True)


class OtherRanks:
    """What the others answer, one after the other."""

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers = list(answers)

    def agree(self, is_true: bool) -> bool:
        return self.answers.pop(0) and is_true


class Model:
    """An engine and the reference that finds no difference."""

    device = torch.device("cpu")
    dtype = torch.float32
    num_threads = 1
    forward = None
    pool = SimpleNamespace(block_size=4)

    def __init__(self) -> None:
        self.name = ""

    def torch_runner(self, name: str, kernels: Any = None, fused: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=name)

    def use(self, runner: Any) -> None:
        self.name = runner.name

    def difference(self, *_: Any) -> str | None:
        return None


@pytest.mark.parametrize(
    ("answers", "name"),
    [
        ((True, True), "native attention"),
        ((False, True), "torch attention"),  # another rank has no compiler
        ((True, False, True), "torch attention"),  # another rank's kernels are wrong
    ],
)
def test_the_runner_is_one_that_all_ranks_have(answers: Sequence[bool], name: str) -> None:
    model: Any = Model()
    ranks: Any = OtherRanks(answers)
    choose_runner(model, model, (), reference=model, settings=SETTINGS, ranks=ranks)
    assert (model.name, ranks.answers) == (name, [])


def test_a_model_that_is_wrong_on_another_rank_is_refused() -> None:
    model: Any = Model()
    ranks: Any = OtherRanks((True, False, False))
    with pytest.raises(ModelNotSupported, match="it is wrong on another rank"):
        choose_runner(model, model, (), reference=model, settings=SETTINGS, ranks=ranks)


def test_one_process_asks_nobody() -> None:
    model: Any = Model()
    names = [runner.name for runner in runners(model, model, (), SETTINGS, None)]
    assert names == ["native attention", "torch attention"]


@pytest.mark.parametrize("error", [triton_errors.OutOfResources(300_000, 232_448, "memory"), OSError("no ptxas")])
def test_a_runner_whose_pass_raises_anything_is_not_used(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = Model()
    fails = [error]

    def difference(engine: Any) -> None:
        if fails:
            raise fails.pop()

    choose_runner(model, model, (), reference=SimpleNamespace(difference=difference), settings=SETTINGS, ranks=None)
    assert model.name == "torch attention"
    assert f"m: native attention is not used: {type(error).__name__}: " in caplog.text


def test_a_lost_rank_is_no_fault_of_the_runner() -> None:
    model: Any = Model()

    def difference(engine: Any) -> None:
        raise Unavailable("rank 1 is gone")

    reference: Any = SimpleNamespace(difference=difference)
    with pytest.raises(Unavailable, match="rank 1"):
        choose_runner(model, model, (), reference=reference, settings=SETTINGS, ranks=None)
