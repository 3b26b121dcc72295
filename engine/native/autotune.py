"""How far ahead of their use weights are prefetched: measured on this machine when a model is first loaded.

A pass of few rows waits for its weights. Some processors fetch them in time by themselves (AMD Zen 4); on others (Intel
Sapphire and Emerald Rapids) five rows then take half as long again as one, unless each step asks for the weights some
kilobytes ahead. Two distances hold for all products of a model: of one row, where the processor's own prefetcher is
often as good, and of several. A distance changes no sum: results are the same to the bit under every choice.

The choice is kept in the cache folder, in a file named after kernels, processor, number of threads and shapes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from engine.native import amx
from engine.native.library import NativeLibrary
from engine.native.weight_sweeps import WeightRun, WeightSweep
from specdec.compiler import cache_folder, only_one, processor

logger = logging.getLogger(__name__)

#: Candidates, in bytes; 0 leaves prefetching to the processor.
DISTANCES: Final = (0, 4096, 8192, 16384)
#: Decoding, and verification of four drafted tokens.
_ROWS: Final = (1, 5)
#: Weights smaller than these stay in the caches next to the cores: nothing is measured, and nothing prefetched.
_SMALLEST_BYTES: Final = 8 * 2**20
SECONDS: Final = 0.4
_MIN_ROUNDS: Final = 3
#: What a distance must save to be preferred to none.
_MARGIN: Final = 0.02

#: By distance: the shortest milliseconds of each of ``_ROWS``.
Times: TypeAlias = dict[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """What was chosen for a model."""

    #: Bytes where one row is multiplied; 0: none.
    one_row: int = 0
    several_rows: int = 0
    #: "measured" now, "cached" from an earlier load, or "default".
    source: str = "default"
    #: Rows from which AMX multiplies grouped weights (:mod:`engine.native.amx`); 0: never.
    amx_rows: int = 0

    def __str__(self) -> str:
        """For people."""
        tiles = f"AMX from {self.amx_rows} rows on, " if self.amx_rows else ""
        return f"{tiles}prefetch {self.one_row} B for one row, {self.several_rows} B for several ({self.source})"

    def distance(self, num_rows: int) -> int:
        """Bytes for a product of so many rows."""
        return self.one_row if num_rows == 1 else self.several_rows


def choose_prefetch(
    library: NativeLibrary, runs: Sequence[WeightRun], num_threads: int, mode: str = "cached"
) -> Prefetch:
    """The fastest distance for a model with these weights, which are multiplied on AMX where that is faster.

    ``mode``: "cached" measures unless a choice is kept, "always" measures, "off" does not prefetch. One process
    measures at a time; the others wait for it and read its choice. A file that cannot be read is replaced; where none
    can be written, every load measures.
    """
    if mode == "off" or _bytes_of_all(runs) < _SMALLEST_BYTES:
        return Prefetch()
    on_amx = amx.usable(library, runs, num_threads)
    prefetch = _chosen(library, runs, on_amx, num_threads, mode)
    amx.use(library, on_amx, prefetch.amx_rows)
    return prefetch


def _chosen(
    library: NativeLibrary, runs: Sequence[WeightRun], on_amx: Sequence[WeightRun], num_threads: int, mode: str
) -> Prefetch:
    """What an earlier load kept, else what is measured now; ``on_amx`` are weights that AMX may multiply."""
    path = cache_folder() / f"autotune-{_key(library, runs, bool(on_amx), num_threads)}.json"
    if mode == "cached" and (kept := _read(path)) is not None:
        return kept
    with ExitStack() as stack:
        try:  # target and draft, started together, would measure each other
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_one(path.with_name("autotune.lock")))
        except OSError as error:
            logger.warning("prefetching is measured while other processes may measure, too: %s", error)
        if mode == "cached" and (kept := _read(path)) is not None:  # another process was faster
            return kept
        return _measured(library, runs, on_amx, num_threads, path)


def _measured(
    library: NativeLibrary, runs: Sequence[WeightRun], on_amx: Sequence[WeightRun], num_threads: int, path: Path
) -> Prefetch:
    """Measure, choose, and keep the choice."""
    times = _measure(library, runs, num_threads)
    one, several = [fastest({distance: found[i] for distance, found in times.items()}) for i in range(len(_ROWS))]
    on_amx_ms = amx.measure(library, on_amx, num_threads, several) if on_amx else {}
    prefetch = Prefetch(one, several, "measured", amx.fewest_rows(on_amx_ms))
    logger.info("%d MB of weights: %s", _bytes_of_all(runs) >> 20, prefetch)
    logger.debug("ms by distance: %s; by rows, without and with AMX: %s", times, on_amx_ms)
    _write(path, prefetch, {"rows": _ROWS, "ms": times, "amx_ms": on_amx_ms})
    return prefetch


def fastest(ms: Mapping[int, float]) -> int:
    """The distance that takes least; none unless another saves 2 %."""
    best = min(ms, key=lambda distance: ms[distance])
    return best if ms[best] < (1 - _MARGIN) * ms[0] else 0


def _bytes_of_all(runs: Sequence[WeightRun]) -> int:
    return sum(run.num_bytes for run in runs)


def _key(library: NativeLibrary, runs: Sequence[WeightRun], on_amx: bool, num_threads: int) -> str:
    """A name for all that the choice depends on."""
    kernels = hashlib.sha256(library.path.read_bytes()).hexdigest()
    shapes = [(run.num_panels, run.in_features, str(run.dtype), run.num_bytes) for run in runs]
    text = json.dumps([kernels, processor(), num_threads, DISTANCES, shapes, on_amx])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _measure(library: NativeLibrary, runs: Sequence[WeightRun], num_threads: int) -> Times:
    """Time products with all weights, one after another as in a pass, with each distance."""
    sweep = WeightSweep(library, runs, num_threads, max(_ROWS)).ms
    sweep(1, 0)  # wakes the threads, maps the memory
    found: dict[int, list[tuple[float, ...]]] = {distance: [] for distance in DISTANCES}
    ends = time.perf_counter() + SECONDS
    while len(found[0]) < _MIN_ROUNDS or time.perf_counter() < ends:
        for distance, rounds in found.items():
            rounds.append(tuple([sweep(rows, distance) for rows in _ROWS]))
    return {
        distance: tuple([round(min(column), 4) for column in zip(*rounds, strict=True)])
        for distance, rounds in found.items()
    }


def _read(path: Path) -> Prefetch | None:
    """The choice kept in a file, None where there is none that can be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s is measured again: %s", path, error)
        return None
    try:
        found = json.loads(text)
        kept, amx_rows = found["prefetch"], found["amx_rows"]
    except (ValueError, TypeError, KeyError):
        kept, amx_rows = None, 0
    if (
        not isinstance(kept, list)
        or len(kept) != len(_ROWS)
        or not all(type(d) is int and d in DISTANCES for d in kept)
        or not (type(amx_rows) is int and amx_rows in (0, *amx.ROWS))
    ):
        logger.warning("%s names nothing that can be chosen and is measured again", path)
        return None
    return Prefetch(kept[0], kept[1], "cached", amx_rows)


def _write(path: Path, chosen: Prefetch, times: Mapping[str, object]) -> None:
    """Keep a choice; a file that is there is replaced at once."""
    kept = {"prefetch": [chosen.one_row, chosen.several_rows], "amx_rows": chosen.amx_rows}
    text = json.dumps({**kept, **times}, indent=1) + "\n"
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="autotune-") as folder:
            made = Path(folder, path.name)
            made.write_text(text, encoding="utf-8")
            os.replace(made, path)
    except OSError as error:
        logger.warning("the choice of prefetching is not kept and will be measured at every load: %s", error)
