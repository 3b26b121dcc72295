"""``tandem models``: the checkpoints on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.errors import InvalidRequest
from tandem.catalog import known_checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem models``."""
    parser.add_argument(
        "folders", metavar="FOLDER", nargs="*", type=Path, default=[Path()],
        help="folders whose checkpoints are listed, and those of folders one level below",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print a line for each: what to give as MODEL, where it is, its architecture, the size of its weights."""
    for folder in args.folders:
        if not folder.exists():
            raise InvalidRequest(f"{folder} does not exist; give folders that hold checkpoints", param="folders")
    rows = [
        (each.name, each.place, each.architecture, _size(each.num_bytes)) for each in known_checkpoints(args.folders)
    ]
    rows.insert(0, ("MODEL", "PLACE", "ARCHITECTURE", "WEIGHTS"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
