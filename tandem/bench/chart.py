"""The measurement as a picture: speed over plain decoding with the limits, and what a reader waits for a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.bench.limits import Spread
from tandem.bench.results import Section


def draw_report(pyplot: Any, title: str, sections: Sequence[Section], path: str) -> None:
    """Write a PNG (or what the file's ending says)."""
    names = list(dict.fromkeys(name for section in sections for name in section.modes))
    rows = max(len(section.modes) for section in sections) * len(sections)
    figure, (speeds, waits) = pyplot.subplots(1, 2, figsize=(12, 1.6 + 0.34 * rows), sharey=True)
    place, steps, labels = 0.0, [], []
    for section in sections:
        for name, mode in section.modes.items():
            colour = f"C{names.index(name) % 10}"
            spread = section.speedup(name) or Spread.of(mode.rates)
            reach = [[spread.median - spread.low], [spread.high - spread.median]]
            speeds.barh(place, spread.median, xerr=reach, color=colour, height=0.8, error_kw={"elinewidth": 0.8})
            speeds.annotate(f"{Spread.of(mode.rates).median:.0f} tok/s", (0, place), (4, 0), va="center", fontsize=7,
                            textcoords="offset points", color="white")  # fmt: skip
            if mode.limits is not None:
                speeds.plot(mode.limits.serial, place, "k|", markersize=11)
                speeds.plot(mode.limits.overlapped, place, "k>", markersize=5)
            itl = mode.percentiles_ms(mode.itl_s)
            if itl:
                waits.barh(place, itl["p50"], color=colour, height=0.8)
                waits.plot([itl["p50"], itl["p99"]], [place, place], color="black", linewidth=0.8)
                waits.plot(itl["p90"], place, "k|", markersize=8)
            steps.append(place)
            labels.append(f"{name} ({section.title})")
            place += 1.0
        place += 0.6
    over_plain = all(section.speedup(name) is not None for section in sections for name in section.modes)
    speeds.set_yticks(steps, labels=labels, fontsize=8)
    speeds.invert_yaxis()
    speeds.set_xlabel("speed over plain decoding (| serial limit, ▸ overlapped limit)" if over_plain else "tokens/s")
    if over_plain:
        speeds.axvline(1.0, color="black", linewidth=0.8)
    waits.set_xlabel("inter-token latency, ms: median (bar), p90 (|), p99 (line)")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
