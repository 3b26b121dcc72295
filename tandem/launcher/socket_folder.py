"""A folder for the Unix domain sockets of one machine's services."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

#: The system takes paths of sockets up to about 100 bytes; this leaves room for a name.
_LONGEST: Final = 70


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder that only this user can enter; it goes at the end, with what is in it."""
    place = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix="tandem-", dir=place if len(place) <= _LONGEST else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)
