"""The never-slower benchmark: its points, its files, and one tiny run against a fake system."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import command, concurrency
from benchmarks.concurrency import Point, draw, measure_points, merge, read_points, show
from benchmarks.pacing_report import WindowReport, counted
from gateway.pacing.stats import Mode, PacingStats, PacingStatsCollector
from specdec.errors import InvalidRequest
from specdec.params import SamplingParams
from specdec.rules import Rule
from tandem.bench.answers import Piece
from tandem.bench.limits import Spread
from tandem.bench.plot import load_pyplot

LABEL = Point(target="bundled", draft="good", k=4, temperature=0.0, rule="block")


class FakeSystem:
    """Two tokens a piece with speculation, one without; a piece takes 2 ms with both."""

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, rule: Rule | None, k: int
    ) -> AsyncGenerator[Piece, None]:
        assert rule is Rule.BLOCK
        for _ in range(params.max_tokens or 0):
            await asyncio.sleep(0.002)
            yield Piece(time.perf_counter(), 2 if k else 1, "")


@pytest.mark.usefixtures("virtual_time")
async def test_ratios_of_a_system_that_is_twice_as_fast() -> None:
    told: list[int] = []
    points = await measure_points(
        FakeSystem(),  # type: ignore[arg-type]
        [(1,), (2,)],
        LABEL,
        (1, 3),
        warm_up_s=0.15,
        repeats=2,
        seconds=0.1,
        max_tokens=8,
        tell=lambda point: told.append(point.sessions),
    )
    assert told == [point.sessions for point in points] == [1, 3]
    for point in points:
        assert point.ratio.spread.median == pytest.approx(2.0)
        assert point.control.spread.median == pytest.approx(1.0)
        assert point.tokens_per_round == 2
        assert len(point.plain) == len(point.speculative) == 4
        assert len(point.learning) >= 1


def point(draft: str = "good", sessions: int = 1, speculative: float = 20.0) -> Point:
    pairs = {
        "plain": [10.0, 10.0],
        "speculative": [speculative, speculative],
        "learning": [speculative],
        "windows": [WindowReport(rounds=1.0)],
    }
    return replace(LABEL, draft=draft, sessions=sessions, **pairs)


def test_the_control_pairs_windows_next_to_each_other() -> None:
    """On, off, off, on: of four windows without speculation the first two are neighbours, and the last two."""
    measured = replace(LABEL, plain=[10.0, 11.0, 20.0, 22.0], speculative=[5.0, 22.0, 10.0, 44.0])
    assert measured.control.spread == Spread(pytest.approx(1.1), pytest.approx(1.1), pytest.approx(1.1))
    assert measured.ratio.spread.median == pytest.approx(1.25)


def test_a_report_is_read_from_the_metrics_of_a_gateway() -> None:
    stats = PacingStats(num_draft_tokens=60, trial_loss_s=0.5)
    stats.num_verdicts.update({Mode.SPECULATIVE: 30, Mode.PLAIN: 10})
    stats.num_trials[Mode.SPECULATIVE] = 2
    registry = CollectorRegistry()
    registry.register(PacingStatsCollector(lambda: {"target": stats}))
    text = generate_latest(registry).decode()
    before = WindowReport(rounds=10.0, speculative_trials=1.0, wall_s=1.0)
    found = WindowReport(wall_s=3.0, draft_s=1.0, **counted(text_string_to_metric_families(text)))
    report = found.since(before)
    assert (report.rounds, report.plain, report.speculative_trials, report.lost_s) == (20, 10, 1, 0.5)
    assert report.drafted_share == pytest.approx(2 / 3)
    assert report.plus(report).mean_k == pytest.approx(3.0)
    assert "67% of rounds drafted, k 3.0; 1 trials of speculation, 0 of plain decoding lost 25.0%" in report.show()
    assert "draft 50% busy" in report.show()


def test_a_newer_point_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    old = [point("bad", 8), point("good", 8), point("good", 1)]
    file = tmp_path / "points.json"
    assert read_points(file) == []
    file.write_text(json.dumps({"points": [asdict(each) for each in old]}))
    assert read_points(file) == old
    merged = merge(old, [point("good", 8, speculative=30.0)])
    assert [(each.draft, each.sessions, each.ratio.spread.median) for each in merged] == [
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
