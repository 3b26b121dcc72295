"""``tandem certs``: a CA, and certificates for gateway, target and draft."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem certs``."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write to; what is there and valid is kept")
    parser.add_argument(
        "--host", metavar="NAME", nargs="+", action="extend", default=[],
        help="names and IP addresses of the machines the services run on",
    )  # fmt: skip
    parser.add_argument("--days", type=int, default=365, metavar="N", help="days the certificates are valid")


def run(args: argparse.Namespace) -> int:
    """Write the files and name the new ones."""
    from tandem.certificates import write_certificates  # noqa: PLC0415 (`tandem --help` needs none)

    written = write_certificates(args.folder, hosts=args.host, days=args.days)
    print("\n".join(f"wrote {path}" for path in written) or f"{args.folder} has all certificates already")
    return 0
