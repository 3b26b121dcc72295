"""The task suite: its prompts, and where speculation stops paying."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from benchmarks import drafters
from benchmarks import tasks as command
from specdec.errors import InvalidRequest
from tandem.bench.break_even import ALL_TASKS, curves_of, table_of
from tandem.bench.plans import make_plans
from tandem.bench.tasks import TASKS, make_task_prompts


def test_eleven_tasks_make_as_many_different_prompts_as_are_needed() -> None:
    assert len(TASKS) == 11
    for task in TASKS:
        prompts = make_task_prompts(task, 2000)
        assert len(set(prompts)) == 2000
        assert prompts[:4] == make_task_prompts(task, 4), "the same in every run"
        assert not any(prompt[-1].isspace() for prompt in prompts), "a token may begin with white space"


def test_a_task_without_enough_prompts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, object]", TASKS), "maths", lambda rng: f"{rng.randrange(3)} +")
    assert [len(make_task_prompts("maths", count)) for count in (0, 3)] == [0, 3]
    with pytest.raises(InvalidRequest, match=r"4 prompts of maths are wanted but only 3 .* ask for fewer"):
        make_task_prompts("maths", 4)


def test_a_plan_of_tasks() -> None:
    usual = {"prompts": None, "prompt_tokens": 16, "max_tokens": 16, "num_prompts": 2, "drafter": "all"}
    usual |= {"fixed_draft_length": False}
    plans = make_plans(Namespace(**usual, text="tasks", batch_size=(1, 4)), lambda text: tuple(text.encode()))
    assert [(plan.text, plan.num_sessions) for plan in plans] == [(task, num) for task in TASKS for num in (1, 4)]
    assert not any(plan.probes for plan in plans), "their report has no parts of a round"
    for one, four in zip(plans[::2], plans[1::2], strict=True):
        used = [prompt for plan in (one, four) for batch in (*plan.warm_up, *plan.batches) for prompt in batch]
        assert len(used) == len(set(used)) == 3 + 4 * 3
    (plan,) = make_plans(Namespace(**usual, text="maths", batch_size=(1,)), None)
    assert isinstance(plan.batches[0][0], str)
    with pytest.raises(InvalidRequest, match=r"poems; choose from prose, tasks, code, .*, writing"):
        make_plans(Namespace(**usual, text="poems", batch_size=(1,)), None)


def section(task: str, num_sessions: int, ratio: float, noise: float = 0.0, **counts: int) -> dict[str, object]:
    """Four pairs around ``ratio``."""
    rates = [100 * (ratio + noise * side) for side in (-1, 1, -1, 1)]
    modes = {"plain": {"tokens_per_s": [100.0] * 4}, "ngram": {"tokens_per_s": rates, **counts}}
    return {"text": task, "num_sessions": num_sessions, "modes": modes}


def test_break_even_is_the_largest_number_of_sessions_that_still_pays() -> None:
    counts = {"num_spec_steps": 10, "num_accepted_draft_tokens": 15}
    plain, ngram = curves_of(
        [
            section("code", 8, 0.9),
            section("code", 1, 1.5, **counts),
            section("code", 4, 0.98, noise=0.1),
            section("code", 2, 1.2),
        ]
    )
    assert (plain.break_even, plain.rates, plain.ratios) == (None, {1: 100, 2: 100, 4: 100, 8: 100}, {})
    assert ngram.break_even == 4, "0.98 is 1 within its error"
    assert ngram.acceptance_length == 2.5
    assert curves_of([section("code", 1, 0.9)])[1].break_even == 0
    assert curves_of([section("code", 1, 1.5), section("code", 1, 1.7)])[1].ratios[1].spread.median == pytest.approx(
        1.6
    )


def test_all_tasks_together_and_servers_that_tell_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    curves = curves_of([section("code", 1, 1.5), section("maths", 1, 0.5, num_tokens=30, num_pieces=10)])
    assert [(curve.task, curve.mode) for curve in curves] == [
        (task, mode) for task in ("code", "maths", ALL_TASKS) for mode in ("plain", "ngram")
    ]
    assert curves[-1].ratios[1].spread.median == pytest.approx(1.0)
    Console(width=120).print(table_of(curves))
    printed = capsys.readouterr().out
    for text in ("1.50 ± 0.00", "≈3.00", "100"):
        assert text in printed


def test_one_table_of_all_drafters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"num_spec_steps": 10, "num_accepted_draft_tokens": 15, "draft_ns": 2 * 10**7}
    states = {"num_hidden_states": 2, "hidden_state_bytes": 392}
    runs = {
        "bundled": [section("code", 1, 1.5, **counts, **states), section("maths", 8, 0.5, **counts)],
        "padded": [section("code", 1, 2.5), section("maths", 1, 2.5)],
    }
    asked: list[list[str]] = []

    def bench(arguments: list[str]) -> int:
        asked.append(arguments)
        target = "padded" if "--pad-target" in arguments else "bundled"
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps({"sections": runs[target]}))
        return 0

    monkeypatch.setattr("tandem.cli.main.main", bench)
    kept = str(tmp_path / "kept.json")
    for targets in (["bundled"], ["padded"], ["none"]):
        monkeypatch.setattr(sys, "argv", ["drafters", "--targets", *targets, "--json", kept])
        assert drafters.main() == 0
    assert len(asked) == 2
    *_, row = capsys.readouterr().out.splitlines()
    assert row == "| `ngram` | 2.50 | 2.00 | 196 | 1.50 ± 0.00 | 0.50 ± 0.00 | 2.50 ± 0.00 |"


def test_prompts_as_a_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tasks", "--count", "2"])
    assert command.main() == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["category"] for line in lines] == [*TASKS, *TASKS]
