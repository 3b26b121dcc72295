"""What do fewer bits save, and do more rows still cost little? Passes of one model in every format of its weights.

``python -m benchmarks.formats`` loads the model once for each format and times the same passes of all of them in turn:
decoding, verification of 4 and 7 drafted tokens, and a step of 8 sessions without and with 3 drafted tokens each. The
share is that of the weights' bytes, read with the bandwidth at which the same threads read a large array.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.engine import Load, find_model, load_engine, read_bandwidth, run_pass
from specdec.flags import Parser
from specdec.process.cores import usable_cores

#: Name, dtype and quantization.
FORMATS: Final = (
    ("float32", "float32", None),
    ("bfloat16", "bfloat16", None),
    ("int8", "float32", "int8"),
    ("int4", "float32", "int4"),
)
CONTEXT: Final = 128
#: Sessions and rows of each.
DECODE, VERIFY_5, VERIFY_8, STEP_8, STEP_32 = (Load(s, r, CONTEXT) for s, r in ((1, 1), (1, 5), (1, 8), (8, 1), (8, 4)))
_LOADS: Final = (DECODE, VERIFY_5, VERIFY_8, STEP_8, STEP_32)
_READ_BYTES: Final = 256 * 2**20
_MIN_ROUNDS: Final = 3


@dataclass(frozen=True, slots=True)
class FormatTimes:
    """What the passes of one format took."""

    name: str
    weight_bytes: int
    #: Medians of the passes, ms.
    decode: float
    verify_5: float
    verify_8: float
    step_8: float
    step_32: float

    def share(self, bandwidth: float) -> float:
        """Of a bandwidth in bytes/s, at which decoding reads the weights."""
        return self.weight_bytes / (self.decode / 1e3) / bandwidth


def measure(folder: str, formats: Sequence[str], threads: int, seconds: float) -> tuple[list[FormatTimes], float]:
    """Medians of every format, measured in turn until the time is over; and the bandwidth in bytes/s."""
    import torch  # noqa: PLC0415

    engines = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, dtype, quantization in FORMATS:
            if name in formats:
                options = argparse.Namespace(dtype=dtype, quantization=quantization, threads=threads, autotune="cached")
                place = Path(scratch, name)
                place.mkdir()
                engines[name] = load_engine(folder, options, _LOADS, place)
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.int32)
    found: dict[tuple[str, Load], list[float]] = {(name, load): [] for name in engines for load in _LOADS}
    bandwidths: list[float] = []
    ends = time.perf_counter() + seconds
    while len(bandwidths) < _MIN_ROUNDS or time.perf_counter() < ends:
        bandwidths.append(read_bandwidth(memory, threads))
        for (name, load), times in found.items():
            times.append(1e3 * run_pass(engines[name][0], load))
    reports = [
        FormatTimes(name, weight_bytes, *(median(found[name, load]) for load in _LOADS))
        for name, (_, weight_bytes) in engines.items()
    ]
    return reports, median(bandwidths)


def table_of(reports: Sequence[FormatTimes], bandwidth: float) -> Table:
    """The numbers for people."""
    table = Table()
    for title in ("weights", "MB", "decode(1) ms", "share", "verify(5) / decode(1)", "verify(8) / decode(1)"):
        table.add_column(title, justify="left" if title == "weights" else "right")
    table.add_column("8 rows ms", justify="right")
    table.add_column("32 rows / 8 rows", justify="right")
    for one in reports:
        ratios = (one.verify_5 / one.decode, one.verify_8 / one.decode)
        table.add_row(
            one.name,
            f"{one.weight_bytes / 1e6:.0f}",
            f"{one.decode:.2f}",
            f"{one.share(bandwidth):.0%}",
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{one.step_8:.2f}",
            f"{one.step_32 / one.step_8:.2f}",
        )
    return table


def parser() -> Parser:
    """The flags."""
    flags = Parser("python -m benchmarks.formats", description=__doc__)
    flags.add_argument("--model", default="padded", help="bundled, padded, or a folder")
    flags.add_argument("--formats", default=",".join(name for name, *_ in FORMATS), help="by default all")
    flags.add_argument("--threads", type=int, default=usable_cores(), help="default: all cores")
    flags.add_argument("--seconds", type=float, default=20.0, help="at least three rounds are made")
    flags.add_argument("--json", metavar="FILE", help="write the numbers to a file, too")
    return flags


def main() -> int:
    """Measure, print, write."""
    args = parser().parse_args()
    console = Console(width=130)
    reports, bandwidth = measure(find_model(args.model), args.formats.split(","), args.threads, args.seconds)
    console.print(f"{args.model}, {args.threads} threads; memory is read at {bandwidth / 1e9:.1f} GB/s")
    console.print(table_of(reports, bandwidth))
    if args.json:
        content = {"bandwidth": bandwidth, "formats": [asdict(one) for one in reports]}
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    command.run("benchmarks.formats", main)
