from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

from benchmarks.distance_chart import DOCS, draw

_LINES = (DOCS / "distance.jsonl").read_text().splitlines()


def test_the_chart_shows_the_committed_lines(tmp_path: Path) -> None:
    draw(_LINES, tmp_path / "distance.svg")
    drawn, committed = (
        re.findall(r'<path d="[^"]*"', path.read_text()) for path in (tmp_path / "distance.svg", DOCS / "distance.svg")
    )
    assert drawn == committed
    labels = Counter(json.loads(line)["label"] for line in _LINES)
    text = (DOCS / "distance.svg").read_text()
    assert {label for label in labels if f">{label}<" in text} == {label for label in labels if labels[label] > 1}
