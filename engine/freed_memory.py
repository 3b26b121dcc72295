"""Memory that goes back to the system as soon as it is freed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: Of glibc's malloc.h: from which size on an allocation is mapped by itself, and what is kept free at the heap's end.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
_SMALLEST_MAPPED: Final = 2**17
#: Where glibc's own thresholds end, which grow with what is freed.
_LARGEST_THRESHOLD: Final = 2**25


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Until it ends every tensor of 128 KiB or more is mapped by itself, where the C library is glibc.

    Else tensors that are freed one after another leave holes in the heap, of which later ones touch some and not
    others: what a process holds would depend on their order.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, _SMALLEST_MAPPED)
    set_option(_TRIM_THRESHOLD, _SMALLEST_MAPPED)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        set_option(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
