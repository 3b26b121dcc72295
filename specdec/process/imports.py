"""Imports of large packages, as a process does them that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import without garbage collection, and leave what there is then out of every later one.

    torch and transformers make a million objects that stay. A full collection looks at all of them, and an import runs
    several: without them a target imports its modules in 2.6 s, with them in 3.4 s. Later, each
    full collection would stop a service for 0.3 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
