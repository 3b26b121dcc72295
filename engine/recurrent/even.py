"""Modules whose elementwise functions are replaced during passes that ask for it, and as they are in all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

#: Makes what is entered around a module's forward.
Replacing: TypeAlias = Callable[[], AbstractContextManager[object]]


class _Asked(threading.local):
    """What the pass of this thread asks for."""

    replacing: Replacing | None = None


_asked = _Asked()


@contextmanager
def ask_for(replacing: Replacing | None) -> Iterator[None]:
    """For a pass of the calling thread; None: for nothing."""
    before, _asked.replacing = _asked.replacing, replacing
    try:
        yield
    finally:
        _asked.replacing = before


def run_evenly(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module's forward, with what the pass asks for entered once around it."""
    replacing = _asked.replacing
    if replacing is None:
        return forward(*args, **kwargs)
    with ask_for(None), replacing():
        return forward(*args, **kwargs)
