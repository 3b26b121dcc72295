"""The chart of docs/measurements.md#distance, from the lines of docs/distance.jsonl.

``python -m benchmarks.distance`` prints them; each has the ``label`` of its series added. What it simulates is one
session without loss, so other rows do not show that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from tandem.bench.plot import load_pyplot

DOCS: Final = Path(__file__).parents[1] / "docs"


def draw(lines: Sequence[str], path: Path) -> None:
    """Speed over plain decoding by round trip: with quartiles, and dashed what is simulated. One point is no series."""
    series: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        row = json.loads(line)
        series.setdefault(row["label"], []).append(row)
    pyplot = load_pyplot()
    with pyplot.rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
        colors = pyplot.get_cmap("tab20").colors
        drawn = ((label, rows) for label, rows in series.items() if len(rows) > 1)
        for color, (label, rows) in zip(cycle(colors), drawn, strict=False):
            rtts = [row["rtt_ms"] for row in rows]
            low, high = zip(*(map(float, row["quartiles"].split("–")) for row in rows), strict=True)
            axes.plot(rtts, [row["speed"] for row in rows], "o-", color=color, label=label, markersize=4)
            axes.fill_between(rtts, low, high, color=color, alpha=0.12, linewidth=0)
            if all("never_wait" in row and row["sessions"] == 1 for row in rows) and "lost" not in label:
                simulated = [max(1.0, row["never_wait"], row["wait"]) for row in rows]
                axes.plot(rtts, simulated, "--", color=color, linewidth=0.9)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        ticks = sorted({row["rtt_ms"] for rows in series.values() for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel("round trip to the draft, ms; dashed: simulated")
        axes.set_ylabel("speed over plain decoding")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    draw((DOCS / "distance.jsonl").read_text().splitlines(), DOCS / "distance.svg")
