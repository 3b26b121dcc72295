from __future__ import annotations

import json
from pathlib import Path

from benchmarks.distance_chart import DOCS, draw

_LINES = (DOCS / "distance.jsonl").read_text().splitlines()


def test_the_chart_shows_the_committed_lines(tmp_path: Path) -> None:
    draw(_LINES, tmp_path / "distance.svg")
    for chart in (tmp_path / "distance.svg", DOCS / "distance.svg"):
        text = chart.read_text()
        assert all(f">{json.loads(line)['label']}<" in text for line in _LINES)


def test_no_draft_at_a_distance_costs_speed() -> None:
    """Never below 0.98 of plain decoding."""
    for row in map(json.loads, _LINES):
        assert row["speed"] >= 0.98, row
