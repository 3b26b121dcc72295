"""Whether products of a model's grouped weights run on AMX, and from how many rows on (amx.h).

Where the processor has it, the system is asked for permission, and each load compares bits with those of the AVX-512
kernel; with the first difference all weights stay with that. From how many rows on AMX is faster is measured, not
assumed: a product of few rows waits for its weights on either.

Emerald Rapids, two threads: 115 MB of 4-bit weights took 11.4, 15.1, 21.2 and 39.4 ms for 8, 16, 32 and 64 rows, where
AVX-512 took 12.6, 18.6, 28.9 and 54.4; 203 MB of 8-bit weights 27.2 and 43.5 for 32 and 64 rows, for 28.7 and 49.7.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from engine.native.library import GROUPED, NativeLibrary
from engine.native.weight_sweeps import WeightRun, WeightSweep

logger = logging.getLogger(__name__)

#: Numbers of rows that are measured.
ROWS: Final = (4, 8, 16, 32, 64)
#: Of the comparison: a full tile and a part of one.
_COMPARED_ROWS: Final = 21
_ROUNDS: Final = 3
#: What AMX must save to be preferred.
_MARGIN: Final = 0.02


def use(library: NativeLibrary, runs: Sequence[WeightRun], from_rows: int) -> None:
    """Multiply grouped weights on AMX from so many rows on; 0: never."""
    for run in runs:
        library.use_amx(run.address, run.num_panels, from_rows)


def usable(library: NativeLibrary, runs: Sequence[WeightRun], num_threads: int) -> list[WeightRun]:
    """Those of a model's weights that AMX may multiply, all grouped ones or none; a warning says why it may not."""
    grouped = [run for run in runs if run.dtype == GROUPED[0]]
    if not grouped or (refused := library.ask_for_amx()) < 0:
        return []
    if refused:
        logger.warning("AMX is not used, the system refuses it: %s", os.strerror(refused))
        return []
    sweep = WeightSweep(library, grouped, num_threads, _COMPARED_ROWS)
    for run in sweep.runs:
        wanted = sweep.product(run, _COMPARED_ROWS)
        use(library, [run], 1)
        found = sweep.product(run, _COMPARED_ROWS)
        use(library, [run], 0)
        if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
            logger.warning("AMX is not used: its products are other bits than those of AVX-512")
            return []
    return grouped


def measure(
    library: NativeLibrary, grouped: Sequence[WeightRun], num_threads: int, distance: int
) -> dict[int, tuple[float, float]]:
    """By number of rows: the shortest milliseconds without and with AMX, all weights prefetched ``distance`` ahead."""
    sweep = WeightSweep(library, grouped, num_threads, max(ROWS))
    found = {rows: (float("inf"), float("inf")) for rows in ROWS}
    for rows in ROWS * _ROUNDS:
        use(library, sweep.runs, 0)
        without = sweep.ms(rows, distance)
        use(library, sweep.runs, 1)
        found[rows] = min(found[rows][0], without), min(found[rows][1], sweep.ms(rows, distance))
    use(library, sweep.runs, 0)
    return found


def fewest_rows(ms: Mapping[int, tuple[float, float]]) -> int:
    """The number of rows from which AMX saves 2 % at every larger one that was measured, too; 0: there is none."""
    fewest = 0
    for rows in sorted(ms, reverse=True):
        without, on_amx = ms[rows]
        if on_amx >= (1 - _MARGIN) * without:
            break
        fewest = rows
    return fewest
