"""How many files and connections this process may have open at once."""

from __future__ import annotations

import resource
from typing import Final

#: Files that are needed for other things than the connections of clients.
RESERVE: Final = 128
#: What is asked for where the system sets no limit.
_ENOUGH: Final = 65_536


def raise_file_limit() -> None:
    """Allow as many as the system lets a process allow itself; by default it is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return  # some systems allow fewer than they say; the limit is read again where it counts


def cap_connections(wanted: int, *, num_other_files: int = 0) -> int:
    """As many connections as wanted, or as there are files for: two servers of this process share them.

    ``num_other_files`` are left for others, but no more than half.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    left = soft - RESERVE
    return max(1, min(wanted, (left - min(num_other_files, left // 2)) // 2))
