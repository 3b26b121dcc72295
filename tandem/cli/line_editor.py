"""Lines from a terminal, with editing and a history that later chats see."""

from __future__ import annotations

import contextlib
import os
import readline
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MAX_LINES: Final = 1000


def edited_lines(prompt: str) -> Iterator[str]:
    """Lines until the end of input. Ctrl-C drops the line being written."""
    path = _history_path()
    with contextlib.suppress(OSError):  # there is none yet
        readline.read_history_file(path)
    readline.set_history_length(_MAX_LINES)
    try:
        while True:
            try:
                yield input(prompt)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print()
                return
    finally:
        with contextlib.suppress(OSError):  # a chat does not fail for want of a history
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)


def _history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "tandem" / "chat_history"
