"""The never-slower benchmark: its cells, its table, and one tiny run against a fake system."""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import command, never_slower
from benchmarks.never_slower import Cell, Windows, read_cells, table
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule
from tandem.bench.answers import Piece

PROMPTS = [(1,), (2,)]


class FakeSystem:
    """Two tokens a piece with lookups and right predictions, one otherwise; a piece takes 2 ms with all."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, str, int | None, str]] = []

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        rule: Rule | None,
        k: int | None,
        *,
        method: str = "",
        prediction: str = "",
    ) -> AsyncGenerator[Piece, None]:
        self.asked.append((k, method, params.seed, prediction))
        num_tokens = params.max_tokens or 0
        for number in range(num_tokens):
            await asyncio.sleep(0.002)
            is_last = number == num_tokens - 1
            is_fast = k is None and (method or set(prediction.splitlines()) == {f"text {prompt[0]}"})
            metrics = {"num_draft_tokens": 3} if is_last else None
            yield Piece(time.perf_counter(), 2 if is_fast else 1, f"text {prompt[0]}\n", metrics)


async def measured(drafter: str, sessions: int) -> tuple[Cell, FakeSystem]:
    system = FakeSystem()
    args = argparse.Namespace(warm_up=0.05, repeats=4, seconds=0.1, max_tokens=8, temperature=0.0)
    windows = Windows([system], PROMPTS, args)  # type: ignore[arg-type]
    cell = Cell(system="serve", pair="bundled", drafter=drafter, sessions=sessions)

    await windows.predict()
    await windows.learn(cell)
    for number in range(args.repeats):
        await windows.pair(cell, number)
    return cell, system


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("drafter", "ratio"),
    [("plain", 1.0), ("draft", 1.0), ("ngram", 2.0), ("right", 2.0), ("wrong", 1.0), ("mixed", 5 / 3)],
)
async def test_windows_alternate_on_one_server(drafter: str, ratio: float) -> None:
    cell, system = await measured(drafter, sessions=3)
    assert len(cell.plain) == len(cell.drafted) == 4
    assert cell.ratio.spread.median == pytest.approx(ratio, rel=0.1 if drafter == "mixed" else 1e-6)
    assert not cell.is_slow(0.97)
    drafting = {(method, bool(prediction)) for k, method, _, prediction in system.asked if k is None}
    expected = {"plain": set(), "ngram": {("ngram", False)}, "draft": {("", False)}}
    expected["mixed"] = {("", False), ("ngram", False), ("suffix", False)}
    assert drafting == expected.get(drafter, {("", True)})
    assert cell.counts["num_draft_tokens"] > 0
    seeds = {seed for _, _, seed, _ in system.asked}
    assert len(seeds) > 4 if drafter not in never_slower.PREDICTIONS else seeds == {0, 1}


@pytest.mark.usefixtures("virtual_time")
async def test_requests_go_to_both_gateways_in_turn() -> None:
    systems = [FakeSystem(), FakeSystem()]
    args = argparse.Namespace(warm_up=0.05, repeats=1, seconds=0.1, max_tokens=8, temperature=0.0)
    windows = Windows(systems, PROMPTS, args)  # type: ignore[arg-type]
    await windows.pair(Cell(system="gateways", pair="bundled", drafter="draft", sessions=4), 0)
    first, second = (len(system.asked) for system in systems)
    assert first == second > 8


def cell(drafter: str = "ngram", sessions: int = 1, drafted: float = 9.9, pair: str = "bundled") -> Cell:
    return Cell(
        system="serve", pair=pair, drafter=drafter, sessions=sessions, plain=[10.0, 10.0], drafted=[drafted, drafted]
    )


def test_the_table_marks_what_is_slow() -> None:
    cells = [cell("suffix", 8, 9.0), cell("suffix", 1), cell(), cell(pair="padded", drafted=20.0)]
    assert table(cells, 0.97).splitlines()[2:] == [
        "| serve | bundled | ngram | 0.99 (0.99–0.99) | – |",
        "| serve | bundled | suffix | 0.99 (0.99–0.99) | **0.90 (0.90–0.90)** |",
        "| serve | padded | ngram | 2.00 (2.00–2.00) | – |",
    ]


@pytest.mark.parametrize(("drafted", "status"), [(9.8, 0), (9.6, 1)])
def test_the_exit_status_tells_whether_a_cell_is_slow(
    drafted: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(*_: object) -> list[Cell]:
        return [cell(drafted=drafted)]

    file = tmp_path / "cells.json"
    file.write_text(json.dumps({"cells": [asdict(cell(drafted=5.0)), asdict(cell("draft", drafted=30.0))]}))
    monkeypatch.setattr(never_slower, "measure", measure)
    monkeypatch.setattr("sys.argv", ["never_slower", "--json", str(file)])
    assert never_slower.main() == status
    assert read_cells(file) == [cell(drafted=drafted), cell("draft", drafted=30.0)], "the newer one counts"
    assert "3.00 (3.00–3.00)" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["never_slower", "--drafters", "none", "--json", str(file)])
    assert never_slower.main() == status


def test_lists_on_the_command_line() -> None:
    assert command.numbers("1,8") == (1, 8)
    with pytest.raises(ValueError, match="0"):
        command.numbers("1,0")
    assert command.names(("a", "b"))("b, a") == ("b", "a")
    with pytest.raises(InvalidRequest, match="c is not known"):
        command.names(("a", "b"))("a,c")
