"""The never-slower benchmark: its points, its files, and one tiny run against a fake system."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import command, concurrency
from benchmarks.concurrency import Point, draw, measure_points, merge, read_points, show
from specdec.errors import InvalidRequest
from specdec.sampling.params import SamplingParams
from specdec.sessions import Rule
from tandem.bench.answers import Piece
from tandem.bench.plot import load_pyplot

LABEL = Point(target="bundled", draft="good", k=4, temperature=0.0, rule="block")


class FakeSystem:
    """Two tokens a piece with speculation, one without; a piece takes 2 ms either way."""

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, rule: Rule | None, k: int
    ) -> AsyncGenerator[Piece, None]:
        assert rule is Rule.BLOCK
        for _ in range(params.max_tokens or 0):
            await asyncio.sleep(0.002)
            yield Piece(time.perf_counter(), 2 if k else 1, "")


async def test_ratios_of_a_system_that_is_twice_as_fast() -> None:
    told: list[int] = []
    points = await measure_points(
        FakeSystem(),  # type: ignore[arg-type]
        [(1,), (2,)],
        LABEL,
        (1, 3),
        repeats=2,
        seconds=0.1,
        max_tokens=8,
        tell=lambda point: told.append(point.sessions),
    )
    assert told == [point.sessions for point in points] == [1, 3]
    for point in points:
        assert 1.6 < point.ratio.median < 2.4
        assert point.tokens_per_round == 2
        assert len(point.plain) == len(point.speculative) == 2


def point(draft: str = "good", sessions: int = 1, speculative: float = 20.0) -> Point:
    return replace(LABEL, draft=draft, sessions=sessions, plain=[10.0], speculative=[speculative])


def test_a_newer_point_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    old = [point("bad", 8), point("good", 8), point("good", 1)]
    file = tmp_path / "points.json"
    assert read_points(file) == []
    file.write_text(json.dumps({"points": [asdict(each) for each in old]}))
    assert read_points(file) == old
    merged = merge(old, [point("good", 8, speculative=30.0)])
    assert [(each.draft, each.sessions, each.ratio.median) for each in merged] == [
        ("good", 1, 2.0),
        ("good", 8, 3.0),
        ("bad", 8, 2.0),
    ]
    assert len(merge(old, [replace(point("good", 8), temperature=1.0)])) == 4


def test_table_and_plot(tmp_path: Path) -> None:
    points = [point(), point(sessions=2), point("bad")]
    assert show(points, "title").row_count == 3
    draw(load_pyplot(), points, 0.97, str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("speculative", "status"), [(9.8, 0), (9.6, 1)])
def test_the_exit_status_tells_whether_speculation_was_slower(
    speculative: float, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def measured(*_: object) -> list[Point]:
        return [point(speculative=speculative)]

    file = tmp_path / "points.json"
    monkeypatch.setattr(concurrency, "measure", measured)
    monkeypatch.setattr("sys.argv", ["concurrency", "--json", str(file)])
    assert concurrency.main() == status
    assert read_points(file) == [point(speculative=speculative)]


def test_lists_on_the_command_line() -> None:
    assert command.numbers("1,8") == (1, 8)
    with pytest.raises(ValueError, match="0"):
        command.numbers("1,0")
    assert command.names(("a", "b"))("b, a") == ("b", "a")
    with pytest.raises(InvalidRequest, match="c is not known"):
        command.names(("a", "b"))("a,c")
