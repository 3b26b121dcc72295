"""The measurement as tables."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specdec import __version__
from tandem.bench.limits import Spread, quantile
from tandem.bench.measure import SPECULATIVE, Measurement


def print_report(console: Console, title: str, result: Measurement, notes: Sequence[str]) -> None:
    """Print the speeds, then what explains them."""
    console.print(_speeds(title, result))
    console.print(_explanation(result))
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)


def _speeds(title: str, result: Measurement) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("decoding")
    table.add_column("tokens/s, median (quartiles)", justify="right")
    table.add_column("over plain", justify="right")
    for way, rates in result.rates.items():
        name = f"{way}, k = {result.k}" if way == SPECULATIVE else way
        table.add_row(name, Spread.of(rates).show(), result.ratio(way).show(2))
    return table


def _explanation(result: Measurement) -> Table:
    costs = result.costs
    assert costs is not None
    speedup = result.ratio(SPECULATIVE).median
    serial, overlapped = result.limits()
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    rows: Mapping[str, str] = {
        "α, acceptance per token": f"{result.alpha:.3f}",
        "acceptance length, tokens per round": f"{result.acceptance_length:.2f}",
        "decode(1), target step": f"{costs.decode_ms:.2f} ms",
        f"verify({result.k + 1}) / decode(1)": f"{costs.verify_ms:.2f} ms / {costs.decode_ms:.2f} ms = "
        f"{costs.verify_ratio:.2f}",
        "draft step": f"{costs.draft_ms:.2f} ms",
        "c, draft step / target step": f"{costs.c:.3f}",
        "d, network and serialisation per round / target step": f"{costs.d:.3f} ({costs.wire_ms:.2f} ms)",
        "round": f"{quantile(result.round_ms, 0.5):.2f} ms",
        "round overhead: gateway, gRPC, scheduling": f"{result.round_overhead_ms:.2f} ms",
        "limit, serial": f"{serial:.2f}x, {speedup / serial:.0%} of it reached",
        "limit, overlapped": f"{overlapped:.2f}x, {speedup / overlapped:.0%} of it reached",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def environment_notes(threads: int) -> list[str]:
    """What the numbers depend on besides the code."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "grpcio"))
    return [
        f"{_processor()}, {threads} cores; target {threads} threads, draft 1",
        f"tandem {__version__}, {versions}, Python {platform.python_version()}",
    ]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
