"""The chart of docs/measurements.md#peers, from the table beside it.

``python -m benchmarks.peers_chart`` writes docs/peers.svg.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_DOCS: Final = Path(__file__).parents[1] / "docs"
#: Columns of the table that are drawn: those of one session.
_SERIES: Final = (("plain", "#9aa5b1"), ("draft model", "#2563eb"), ("n-gram", "#0d9488"))


def read_table(page: str) -> dict[str, tuple[float, ...]]:
    """Tokens/s by engine: plain (the mean where two runs are named), with the draft model, with n-grams.

    Raises :class:`ValueError` where the page has no such table.
    """
    _, found, section = page.partition("\n## Peers\n")
    rows = re.findall(r"^\| ([A-Za-z][^|]*) \|([^|]*)\|([^|]*)\|([^|]*)\|", section.partition("\n## ")[0], re.MULTILINE)
    if not found or not rows:
        raise ValueError("docs/measurements.md has no table below ## Peers")
    return {name.replace("`", ""): tuple(_mean(cell) for cell in cells) for name, *cells in rows}


def _mean(cell: str) -> float:
    values = [float(number.replace(",", "")) for number in cell.strip().split(", ")]
    return sum(values) / len(values)


def draw(table: dict[str, tuple[float, ...]], path: Path) -> None:
    """Write the chart as SVG."""
    import matplotlib as mpl  # noqa: PLC0415 (slow to import)

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tandem"
    mpl.rcParams["svg.fonttype"] = "none"  # text, not outlines: a third of the size
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for i, (label, colour) in enumerate(_SERIES):
        places = [row + 0.27 * (i - 1) for row in range(len(table))]
        bars = axes.barh(places, [values[i] for values in table.values()], 0.25, label=label, color=colour)
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axes.set_yticks(range(len(table)), list(table))
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s, one session, 12 M target in float32, two CPU cores")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(read_table((_DOCS / "measurements.md").read_text()), _DOCS / "peers.svg")
