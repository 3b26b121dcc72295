"""Products with a model's packed weights, one after another as in a pass: what is measured and compared at load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from engine.native.library import DTYPES, WEIGHT_DTYPES, NativeLibrary

#: Larger models are measured on their first weights.
_MOST_BYTES: Final = 2**30


class WeightRun(NamedTuple):
    """Panels of packed weights that lie one after another."""

    address: int
    num_panels: int
    in_features: int
    dtype: torch.dtype
    num_bytes: int


class WeightSweep:
    """Products of random rows, ``most_rows`` at most, with weights; what they need is allocated once."""

    def __init__(self, library: NativeLibrary, runs: Sequence[WeightRun], num_threads: int, most_rows: int) -> None:
        self.library = library
        self.num_threads = num_threads
        #: Those that are multiplied.
        self.runs: list[WeightRun] = []
        num_bytes = 0
        for run in runs:
            self.runs.append(run)
            num_bytes += run.num_bytes
            if num_bytes >= _MOST_BYTES:
                break
        self._dtype = torch.bfloat16 if runs[0].dtype == torch.bfloat16 else torch.float32
        self._stride = max(run.in_features for run in self.runs) + 64
        size = (most_rows, self._stride)
        self._x = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(self._dtype)
        columns = max(run.num_panels for run in self.runs) * library.panel
        self._y = torch.empty(most_rows * columns, dtype=self._dtype)
        self._x_at, self._y_at = self._x.data_ptr(), self._y.data_ptr()

    def multiply(self, run: WeightRun, num_rows: int, distance: int = 0) -> None:
        """Multiply one weight, prefetched ``distance`` bytes ahead."""
        columns = run.num_panels * self.library.panel
        weights = WEIGHT_DTYPES[run.dtype], self._x_at, num_rows, self._stride, run.in_features, run.address, columns
        to = self._y_at, columns, 1, distance, self.num_threads
        if self.library.linear(DTYPES[self._dtype], *weights, None, *to):
            raise MemoryError("working memory for a linear layer")

    def product(self, run: WeightRun, num_rows: int) -> torch.Tensor:
        """A copy of what that is: [num_rows * columns]."""
        self.multiply(run, num_rows)
        return self._y[: num_rows * run.num_panels * self.library.panel].clone()

    def ms(self, num_rows: int, distance: int) -> float:
        """Milliseconds that all weights take."""
        start = time.perf_counter()
        for run in self.runs:
            self.multiply(run, num_rows, distance)
        return 1e3 * (time.perf_counter() - start)
