"""The share of the memory's bandwidth that a forward pass on this CPU reaches, by rows and context.

``python -m benchmarks.engine`` times passes without services: one session that feeds 1 row (decoding) to 32, and many
sessions that feed one each, behind contexts of several lengths; with ``--formats`` of one model in several formats. A
pass must read the weights once and every session's keys and values once; those bytes over its time are set against the
bandwidth with which the same threads read a large array. Points are measured alternately: the speed of memory shared
with other machines changes.

The model's positions are extended where a context asks for it, and the cache holds random numbers: neither changes the
time of a pass.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.pairs import PADDED_SIZE, TARGETS
from specdec.errors import InvalidRequest
from specdec.flags import Parser
from specdec.process.cores import usable_cores
from specdec.settings import AUTOTUNE

if TYPE_CHECKING:
    import torch

    from engine.engine import Engine

#: Of the weights: dtype and quantization.
FORMATS: Final[Mapping[str, tuple[str, str | None]]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "int4": ("float32", "int4"),
}
ROWS: Final = (1, 2, 3, 4, 5, 6, 8, 16, 32)
SESSIONS: Final = (1, 2, 4, 8, 16, 32)
CONTEXTS: Final = (128, 1024, 4096)
_READ_BYTES: Final = 256 * 2**20
_MIN_ROUNDS: Final = 3
#: torch's threads spin for a while after they have read.
_PAUSE_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Load:
    """One pass: sessions behind a context each, and the rows each of them feeds."""

    sessions: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class PassTime(Load):
    """What it took."""

    #: Median.
    ms: float
    #: Weights, keys and values, each read once.
    bytes_read: int

    def share(self, bandwidth: float) -> float:
        """Of a bandwidth in bytes/s. More than 1 where caches hold what is read."""
        return self.bytes_read / (self.ms / 1e3) / bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """Everything measured in one run."""

    model: str
    weights: str
    threads: int
    weight_bytes: int
    #: What was chosen for the kernels.
    execution: str
    #: Bytes/s, median.
    bandwidth: float
    points: Sequence[PassTime]

    def find(self, sessions: int, rows: int, context: int) -> PassTime | None:
        """The point of a load, if it was measured."""
        wanted = (sessions, rows, context)
        return next((each for each in self.points if (each.sessions, each.rows, each.context) == wanted), None)

    def ratio(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> float | None:
        """Time of one load over that of another."""
        first, second = self.find(*one), self.find(*other)
        return first.ms / second.ms if first and second else None


def loads(rows: Sequence[int], sessions: Sequence[int], contexts: Sequence[int]) -> list[Load]:
    """One session of every number of rows and every number of sessions of one row, behind every context."""
    found = [Load(1, count, context) for context in contexts for count in rows]
    return found + [Load(count, 1, context) for context in contexts for count in sessions if (count, 1) != (1, rows[0])]


def read_bandwidth(memory: torch.Tensor, threads: int) -> float:
    """Bytes/s with which ``threads`` threads read a large array once."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    start = time.perf_counter()
    memory.max()
    elapsed = time.perf_counter() - start
    torch.set_num_threads(before)
    return memory.numel() * memory.element_size() / elapsed


def load_engine(
    folder: str, args: argparse.Namespace, weights: str, wanted: Sequence[Load], scratch: Path
) -> tuple[Engine, int]:
    """An engine with room for the largest load, its positions extended to the longest, its cache full of numbers.

    Also returns the bytes of its weights.

    Raises:
        InvalidRequest: the model is not run by the native decoder.
    """
    from engine.loading import load  # noqa: PLC0415
    from engine.native.runner import NativeRunner  # noqa: PLC0415
    from specdec.settings import ModelSettings  # noqa: PLC0415

    scratch.mkdir()
    dtype, quantization = FORMATS[weights]
    config = json.loads(Path(folder, "config.json").read_text())
    longest = max(load.context + load.rows for load in wanted)
    config["max_position_embeddings"] = max(longest, config["max_position_embeddings"])
    for path in Path(folder).iterdir():
        if path.name != "config.json":
            (scratch / path.name).symlink_to(path.resolve())
    (scratch / "config.json").write_text(json.dumps(config))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    entry_bytes = 2 * config["num_hidden_layers"] * heads * head_dim * 4
    entries = max(load.sessions * (load.context + load.rows + 64) for load in wanted)
    engine = load.load_engine(
        ModelSettings(
            model=str(scratch), device="cpu", dtype=dtype, quantization=quantization,
            num_threads=args.threads, autotune=args.autotune, kv_cache_memory_bytes=entries * entry_bytes,
        )
    )  # fmt: skip
    if not isinstance(engine.runner, NativeRunner):
        raise InvalidRequest(f"{folder} is run by the {engine.runner.name}, not by the native decoder", param="model")
    for cache in (cache for pair in engine.caches for cache in pair):
        cache.normal_()
    return engine, engine.runner.decoder.weight_bytes


def run_pass(engine: Engine, load: Load) -> float:
    """Seconds of one pass that follows two others."""
    from engine.engine import Segment  # noqa: PLC0415 (torch)

    sequences = [engine.pool.open(load.context + load.rows) for _ in range(load.sessions)]
    segments = [Segment(sequence, list(range(load.rows)), load.rows) for sequence in sequences]
    try:
        elapsed = 0.0
        for _ in range(3):
            for sequence in sequences:
                sequence.length = load.context
            start = time.perf_counter()
            engine.forward(segments)
            elapsed = time.perf_counter() - start
        return elapsed
    finally:
        for sequence in reversed(sequences):
            engine.pool.release(sequence)


def measure(
    engines: Mapping[str, tuple[Engine, int]], wanted: Sequence[Load], seconds: float, threads: int
) -> tuple[dict[str, list[PassTime]], float]:
    """Medians of every load of every engine and of the bandwidth, measured in turn until the time is over."""
    import torch  # noqa: PLC0415

    memory = torch.ones(_READ_BYTES // 4, dtype=torch.int32)
    times: dict[tuple[str, Load], list[float]] = {(name, load): [] for name in engines for load in wanted}
    bandwidths: list[float] = []
    ends = time.perf_counter() + seconds
    while len(bandwidths) < _MIN_ROUNDS or time.perf_counter() < ends:
        bandwidths.append(read_bandwidth(memory, threads))
        time.sleep(_PAUSE_S)
        for engine, _ in engines.values():
            run_pass(engine, wanted[0])  # wakes the engine's threads
        for (name, load), found in times.items():
            found.append(run_pass(engines[name][0], load))
    points: dict[str, list[PassTime]] = {name: [] for name in engines}
    for (name, load), found in times.items():
        engine, weight_bytes = engines[name]
        entry_bytes = sum(cache[0, :, 0].nbytes for pair in engine.caches for cache in pair)
        num_bytes = weight_bytes + load.sessions * (load.context + load.rows) * entry_bytes
        points[name].append(PassTime(load.sessions, load.rows, load.context, 1e3 * median(found), num_bytes))
    return points, median(bandwidths)


def show(report: EngineReport) -> Iterator[Table | str]:
    """The report for people: two tables and what follows from them."""
    contexts = sorted({point.context for point in report.points})
    weights = f"{report.weight_bytes / 1e6:.0f} MB of {report.weights} weights"
    memory = f"memory is read at {report.bandwidth / 1e9:.1f} GB/s"
    yield f"[bold]{report.model}[/]: {weights}, {report.threads} threads, {report.execution}; {memory}"
    for title, of_one_session in (("rows of one session", True), ("sessions, one row each", False)):
        yield f"{title}: ms (share of the bandwidth)"
        table = Table()
        table.add_column(title.partition(" ")[0], justify="right")
        for context in contexts:
            table.add_column(f"context {context}", justify="right")
        numbers = {p.rows if of_one_session else p.sessions for p in report.points if of_one_session or p.rows == 1}
        for number in sorted(numbers):
            found = [report.find(*((1, number) if of_one_session else (number, 1)), context) for context in contexts]
            if any(found):
                cells = (f"{p.ms:.2f} ({p.share(report.bandwidth):.0%})" if p else "" for p in found)
                table.add_row(str(number), *cells)
        yield table
    shortest = contexts[0]
    most = max(point.sessions for point in report.points)
    for rows, over in ((5, 1), (8, 1), (32, 8)):
        if (ratio := report.ratio((1, rows, shortest), (1, over, shortest))) is not None:
            yield f"{rows} rows / {over} behind {shortest} entries: {ratio:.2f}"
    if (ratio := report.ratio((1, 1, shortest), (most, 1, shortest))) is not None and most > 1:
        yield f"{most} sessions decode {most * ratio:.1f} times as many tokens a second as one"


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.engine", description=__doc__)
    flags.add_argument("--model", default="bundled", help=f"{' or '.join(TARGETS)}, or a folder")
    flags.add_argument(
        "--formats", type=command.names(tuple(FORMATS)), default=("float32",), help=f"of {', '.join(FORMATS)}"
    )
    flags.add_argument("--autotune", choices=AUTOTUNE, default="cached", help="default: cached")
    flags.add_argument("--threads", type=int, default=usable_cores(), help="default: all cores")
    flags.add_argument("--rows", type=command.numbers, default=ROWS, help="of one session")
    flags.add_argument("--sessions", type=command.numbers, default=SESSIONS, help="default: 1,2,4,8,16,32")
    flags.add_argument("--contexts", type=command.numbers, default=CONTEXTS, help="default: 128,1024,4096")
    flags.add_argument("--seconds", type=float, default=20.0, help="at least three rounds are made")
    flags.add_argument("--json", metavar="FILE", help="write the numbers to a file, too")
    return flags


def find_model(name: str) -> str:
    """The folder of a target by name, or the folder itself."""
    from tandem.checkpoints import TARGET, find_checkpoint  # noqa: PLC0415
    from tandem.padding import pad_checkpoint  # noqa: PLC0415 (torch)

    if name not in TARGETS:
        return name
    folder = find_checkpoint(TARGET)
    return pad_checkpoint(folder, PADDED_SIZE) if name == "padded" else folder


def main() -> int:
    """Measure, print, write."""
    args = parser().parse_args()
    wanted = loads(args.rows, args.sessions, args.contexts)
    console = Console(width=130)
    with console.status("measuring"), tempfile.TemporaryDirectory() as scratch:
        folder = find_model(args.model)
        engines = {name: load_engine(folder, args, name, wanted, Path(scratch, name)) for name in args.formats}
        points, bandwidth = measure(engines, wanted, args.seconds, args.threads)
    reports = [
        EngineReport(
            model=args.model, weights=name, threads=args.threads, weight_bytes=weight_bytes,
            execution=engine.runner.description, bandwidth=bandwidth, points=points[name],
        )
        for name, (engine, weight_bytes) in engines.items()
    ]  # fmt: skip
    for part in (part for report in reports for part in show(report)):
        console.print(part)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    command.run("benchmarks.engine", main)
