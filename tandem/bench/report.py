"""The measurement as tables: the speeds, then what explains them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from specdec import __version__
from specdec.process.cores import usable_cores
from tandem.bench.break_even import curves_of, table_of
from tandem.bench.limits import Spread
from tandem.bench.parts import RoundCosts
from tandem.bench.results import Measurement, Section

#: Modes beside each other in one explanation.
_COLUMNS: Final = 4


def print_report(console: Console, title: str, sections: Sequence[Section], notes: Sequence[str]) -> None:
    """Print the speeds of each section and what explains them, then what the numbers depend on.

    Sections of the task suite share one table.
    """
    console.print(title, style="bold", highlight=False)
    if tasks := [section.summary() for section in sections if section.is_task]:
        console.print(table_of(curves_of(tasks)))
    for section in (section for section in sections if not section.is_task):
        console.print(_speeds(section))
        for name, mode in section.modes.items():
            if mode.k != 0 and not mode.drafts and mode.no_speculation_reasons:
                reasons = ", ".join(sorted(mode.no_speculation_reasons))
                console.print(f"{name}: no round had drafted tokens ({reasons})", highlight=False)
        if section.language is not None:
            console.print(_validity(section), highlight=False)
        names = [name for name, mode in section.modes.items() if mode.drafts]
        for start in range(0, len(names), _COLUMNS):
            explanation = _explanation(section, names[start : start + _COLUMNS])
            if explanation.row_count:
                console.print(explanation)
    for section in sections:
        for name, mode in section.modes.items():
            if mode.num_differing:
                counted = f"{section.title}, {name}: {mode.num_differing} of {mode.num_compared} answers are not those"
                text = f"{counted} of plain decoding; they are left out of acceptance and of speed over plain"
                console.print(text, style="bold red", highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, style="dim", highlight=False, soft_wrap=True)


def _speeds(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left")
    table.add_column("decoding")
    for column in ("tokens/s (quartiles)", "over plain", "TTFT, ms", "ITL p50 / p90 / p99, ms", "tokens a round"):
        table.add_column(column, justify="right")
    for name, mode in section.modes.items():
        speedup, length = section.speedup(name), mode.acceptance_length
        ttft = mode.percentiles_ms(mode.ttft_s)
        table.add_row(
            name,
            Spread.of(mode.rates).show(),
            "–" if speedup is None else speedup.show(2),
            f"{ttft['p50']:.1f}" if ttft else "–",
            " / ".join(f"{value:.1f}" for value in mode.percentiles_ms(mode.itl_s).values()) or "–",
            "–" if length is None else f"{length:.2f}",
        )
    return table


def _validity(section: Section) -> str:
    parts = (
        f"{name} {mode.num_fitting} of {len(mode.ttft_s)}" + f" ({mode.num_cut_off} cut off)" * bool(mode.num_cut_off)
        for name, mode in section.modes.items()
    )
    return f"answers that fit the schema: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the explanation; ``show`` gives None where a mode has no such number.

    It is given the mode, and its speed over plain decoding from the first token on.
    """

    label: str
    show: Callable[[Measurement, Spread | None], str | None]


def counted(label: str, name: str) -> Row:
    """One of the speculation metrics, per round with drafts."""
    return Row(label, lambda mode, _: _per_round(mode, name, 1.0))


def timed(label: str, name: str) -> Row:
    """One of the speculation metrics in nanoseconds, as milliseconds per round with drafts."""
    return Row(label, lambda mode, _: _per_round(mode, name, 1e6, " ms"))


def _per_round(mode: Measurement, name: str, scale: float, unit: str = "") -> str | None:
    value, rounds = mode.count(name), mode.count("num_spec_steps")
    return f"{value / scale / rounds:.2f}{unit}" if value is not None and rounds else None


def _shares(values: Sequence[float]) -> str | None:
    return " ".join(f"{value:.2f}" for value in values) or None


def _number(value: float | None, form: str, unit: str = "") -> str | None:
    return None if value is None else f"{value:{form}}{unit}"


def _of_costs(form: str, value: Callable[[RoundCosts], float], unit: str = "") -> Callable[..., str | None]:
    return lambda mode, _: None if mode.costs is None else f"{value(mode.costs):{form}}{unit}"


def _of_masks(value: Callable[[RoundCosts], float]) -> Callable[..., str | None]:
    return lambda mode, _: f"{value(mode.costs):.3f} ms" if mode.costs is not None and mode.costs.mask_fill_ms else None


def _limit(name: str) -> Callable[[Measurement, Spread | None], str | None]:
    def show(mode: Measurement, speedup: Spread | None) -> str | None:
        if mode.limits is None or speedup is None:
            return None
        limit = getattr(mode.limits, name)
        return f"{limit:.2f}x, {speedup.median / limit:.0%}"

    return show


def _beyond(mode: Measurement, _: Spread | None) -> str | None:
    if mode.costs is None or mode.round_ms is None:
        return None
    step = mode.costs.verify_ms if mode.drafts else mode.costs.decode_ms
    return f"{mode.round_ms - step:.2f} ms"


#: What explains the speed of a mode that drafts. Metrics a server does not report yet leave no line.
ROWS: Final = (
    Row("α, acceptance per token", lambda mode, _: _number(mode.alpha, ".3f")),
    Row("more than 0, 1, … drafts accepted", lambda mode, _: _shares(mode.acceptance_rates)),
    Row("drafted tokens a round", lambda mode, _: _number(mode.mean_drafts, ".2f")),
    Row("decode(1), target step", _of_costs(".2f", lambda costs: costs.decode_ms, " ms")),
    Row("verify(k+1) / decode(1)", _of_costs(".2f", lambda costs: costs.verify_ratio)),
    Row("sampling and verification, a round", _of_costs(".3f", lambda costs: costs.rules_ms, " ms")),
    Row("filling masks, beside the forward pass", _of_masks(lambda costs: costs.mask_fill_ms)),
    Row("waiting for masks after it", _of_masks(lambda costs: costs.mask_wait_ms)),
    Row("draft step", _of_costs(".2f", lambda costs: costs.draft_ms, " ms")),
    Row("c, draft step / target step", _of_costs(".3f", lambda costs: costs.c)),
    Row("d, network and serialisation / target step", _of_costs(".3f", lambda costs: costs.d)),
    Row("bytes of a round's messages", _of_costs(".0f", lambda costs: costs.wire_bytes)),
    Row("bytes of hidden states, a position", lambda mode, _: _number(mode.state_bytes, ".0f")),
    Row("round", lambda mode, _: _number(mode.round_ms, ".2f", " ms")),
    Row("of it beyond verify(k+1)", _beyond),
    counted("drafted tokens thrown away, a round", "num_wasted_draft_tokens"),
    timed("waiting for the draft, a round", "draft_wait_ns"),
    timed("network to the target and back, a round", "wire_ns"),
    Row("over plain from the first token on", lambda _, speedup: None if speedup is None else speedup.show(2)),
    Row("target at work", lambda mode, _: _number(mode.busy_share(0), ".0%")),
    Row("draft at work", lambda mode, _: _number(mode.busy_share(1), ".0%")),
    Row("limit, serial; share of it reached", _limit("serial")),
    Row("limit, overlapped; share", _limit("overlapped")),
    Row("limit at this price of verification; share", _limit("priced")),
)


def _explanation(section: Section, names: Sequence[str]) -> Table:
    """The rows, a column per mode."""
    table = Table()
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name)
    for row in ROWS:
        values = [row.show(section.modes[name], section.decode_speedup(name)) for name in names]
        if any(value is not None for value in values):
            table.add_row(row.label, *("–" if value is None else value for value in values))
    return table


def machine_notes(target_threads: int) -> list[str]:
    """What the numbers depend on besides the code, where the services run here."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "grpcio"))
    return [
        f"{_processor()}, {usable_cores()} cores; target {target_threads} threads, draft 1",
        f"tandem {__version__}, {packages}, Python {platform.python_version()}",
    ]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
