from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.distance_chart import DOCS, draw

_LINES = (DOCS / "distance.jsonl").read_text().splitlines()


def test_the_chart_shows_the_committed_lines(tmp_path: Path) -> None:
    draw(_LINES, tmp_path / "distance.svg")
    drawn, committed = (
        re.findall(r'<path d="[^"]*"', path.read_text()) for path in (tmp_path / "distance.svg", DOCS / "distance.svg")
    )
    assert drawn == committed
    labels = {json.loads(line)["label"] for line in _LINES}
    assert all(f">{label}<" in (DOCS / "distance.svg").read_text() for label in labels)
