"""Memory and file descriptors of processes over time, and whether they grow."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MIB = 2**20
#: What a process may grow by between the second third of the time and the third: allocators and caches settle slowly.
MAX_GROWTH_BYTES = 24 * MIB
MAX_MORE_FDS = 8


@dataclass
class Sizes:
    """Samples of one process: resident bytes, and open file descriptors."""

    rss: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def add(self, rss: int, fds: int) -> None:
        self.rss.append(rss)
        self.fds.append(fds)

    @property
    def growth_bytes(self) -> int:
        """From the second third of the samples to the last."""
        return _growth(self.rss)

    @property
    def more_fds(self) -> int:
        return _growth(self.fds)

    def describe(self) -> str:
        return (
            f"{self.rss[-1] / MIB:.0f} MiB ({self.growth_bytes / MIB:+.1f}), {self.fds[-1]} descriptors"
            f" ({self.more_fds:+d})"
        )

    @property
    def is_flat(self) -> bool:
        return self.growth_bytes <= MAX_GROWTH_BYTES and self.more_fds <= MAX_MORE_FDS


def _growth(samples: Sequence[int]) -> int:
    """By the medians, so that one large request counts for nothing."""
    third = len(samples) // 3
    assert third, f"{len(samples)} samples are too few"
    return round(median(samples[-third:]) - median(samples[-2 * third : -third]))
