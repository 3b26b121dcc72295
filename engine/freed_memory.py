"""Memory that goes back to the system as soon as it is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: Of glibc's malloc.h: from which size on an allocation is mapped by itself, and what is kept free at the heap's end.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
#: Parts that are rounded or decoded together stay below it, in memory that is used again.
_SMALLEST_MAPPED: Final = 9 * 2**17
_KEPT: Final = 2**23
_SMALLEST_GIVEN_BACK: Final = 2**22
#: Where glibc's own thresholds end, which grow with what is freed.
_LARGEST_THRESHOLD: Final = 2**25


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Until it ends every tensor of more than 1.1 MiB is mapped by itself, where the C library is glibc.

    Else tensors that are freed one after another leave holes in the heap, of which later ones touch some and not
    others: what a process holds would depend on their order.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _SMALLEST_MAPPED)
    set_option(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        set_option(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)


def give_back_freed(num_bytes: int) -> None:
    """Give the free parts of the heap back after a layer of so many bytes was freed, if the C library can.

    That takes milliseconds, so nothing is done for a small layer.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and num_bytes >= _SMALLEST_GIVEN_BACK:
        trim(0)


class FreedParts:
    """What is freed in parts, of which many are too small to be given back one by one."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count so many bytes; give the free parts of the heap back when they are a large layer's."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _SMALLEST_GIVEN_BACK:
            give_back_freed(self._num_bytes)
            self._num_bytes = 0
