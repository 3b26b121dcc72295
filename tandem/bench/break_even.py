"""Break-even concurrency: with how many sessions speculation still pays, by task and drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.table import Table

from tandem.bench.limits import Ratio, Spread
from tandem.bench.modes import PLAIN

#: What is added up.
_COUNTS: Final = (
    *("num_spec_steps", "num_accepted_draft_tokens", "draft_ns", "num_tokens", "num_pieces"),
    *("num_hidden_states", "hidden_state_bytes"),
)
#: The curves of all tasks together.
ALL_TASKS: Final = "all"


@dataclass(frozen=True, slots=True)
class Curve:
    """What one mode brought on one task, by the number of sessions."""

    task: str
    mode: str
    #: Median tokens per second.
    rates: Mapping[int, float]
    #: Speed over plain decoding on the same prompts; empty where plain decoding was not measured.
    ratios: Mapping[int, Ratio]
    #: Tokens of a round with drafts; None where the server does not report it.
    acceptance_length: float | None = None
    #: Tokens of an event of the stream; None where the server reports rounds.
    tokens_per_piece: float | None = None
    #: Milliseconds that the draft computes a round, and bytes of hidden states a token; None where there are none.
    draft_ms: float | None = None
    state_bytes: float | None = None

    @property
    def break_even(self) -> int | None:
        """The largest number of sessions with a ratio of at least 1 within its error; 0 where there is none.

        None where plain decoding was not measured.
        """
        if not self.ratios:
            return None
        return max((num for num, ratio in self.ratios.items() if ratio.spread.median + ratio.error >= 1), default=0)

    @property
    def length(self) -> str:
        """The acceptance length; in its place, after ``≈``, what a client sees: tokens of an event."""
        if self.acceptance_length is not None:
            return f"{self.acceptance_length:.2f}"
        return "–" if self.tokens_per_piece is None else f"≈{self.tokens_per_piece:.2f}"


def curves_of(sections: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """The curves of sections as :meth:`~tandem.bench.results.Section.summary` gives them; sections of the same task and
    number of sessions add up.

    A last task, :data:`ALL_TASKS`, has the pairs of all.
    """
    listed = list(sections)
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for section in listed:
        by_task.setdefault(str(section["text"]), []).append(section)
    if len(by_task) > 1:
        by_task[ALL_TASKS] = listed
    return [
        _curve(task, mode, members)
        for task, members in by_task.items()
        for mode in dict.fromkeys(mode for section in members for mode in section["modes"])
    ]


def _curve(task: str, mode: str, sections: Sequence[Mapping[str, Any]]) -> Curve:
    ours: dict[int, list[float]] = {}
    paired: dict[int, tuple[list[float], list[float]]] = {}
    counts = Counter[str]()
    for section in (section for section in sections if mode in section["modes"]):
        num_sessions, modes = section["num_sessions"], section["modes"]
        rates = modes[mode]["tokens_per_s"]
        ours.setdefault(num_sessions, []).extend(rates)
        if mode != PLAIN and PLAIN in modes:
            over, under = paired.setdefault(num_sessions, ([], []))
            differing = modes[mode].get("differing_runs", ())
            equal = [i for i in range(len(rates)) if i not in differing]
            over += [rates[i] for i in equal]
            under += [modes[PLAIN]["tokens_per_s"][i] for i in equal]
        counts.update({name: modes[mode].get(name, 0) for name in _COUNTS})
    rounds, accepted, draft_ns, tokens, pieces, states, state_bytes = (counts[name] for name in _COUNTS)
    return Curve(
        task,
        mode,
        {num: Spread.of(rates).median for num, rates in sorted(ours.items())},
        {num: Ratio.of(over, under) for num, (over, under) in sorted(paired.items()) if over},
        1.0 + accepted / rounds if rounds else None,
        tokens / pieces if pieces else None,
        draft_ns / rounds / 1e6 if rounds and draft_ns else None,
        state_bytes / states if states else None,
    )


def table_of(curves: Sequence[Curve]) -> Table:
    """The curves as a table: tokens per second of plain decoding, and of the others their ratio to it."""
    counts = sorted({num for curve in curves for num in curve.rates})
    table = Table(title="tokens/s, or speed over plain decoding; by number of sessions", title_justify="left")
    for column in ("task", "decoding"):
        table.add_column(column, no_wrap=True)
    for column in ("tokens a round", *map(str, counts), "break-even"):
        table.add_column(column, justify="right")
    task = None
    for curve in curves:
        if task not in (None, curve.task):
            table.add_section()
        values = (cell(curve, num) for num in counts)
        end = "–" if curve.break_even is None else str(curve.break_even)
        table.add_row("" if curve.task == task else curve.task, curve.mode, curve.length, *values, end)
        task = curve.task
    return table


def cell(curve: Curve, num_sessions: int) -> str:
    """The ratio with its error, or the tokens per second."""
    if num_sessions in curve.ratios:
        ratio = curve.ratios[num_sessions]
        return f"{ratio.spread.median:.2f} ± {ratio.error:.2f}"
    return f"{curve.rates[num_sessions]:.0f}" if num_sessions in curve.rates else "–"
