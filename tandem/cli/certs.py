"""``tandem certs``: a CA, and certificates for gateway, target and draft."""

from __future__ import annotations

import argparse
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from specdec.errors import InvalidRequest, quote

#: A name of the DNS; other than ASCII is written as ``xn--…`` there.
_NAME: Final = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*", re.ASCII)
#: A hundred years.
_MAX_DAYS: Final = 36_500


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
    for host in args.host:
        _check_host(host)
    if not 1 <= args.days <= _MAX_DAYS:
        raise InvalidRequest(f"days is {args.days}; it must be in [1, {_MAX_DAYS}]")
    from tandem.certificates import write_certificates  # noqa: PLC0415 (`tandem --help` needs none)

    written = write_certificates(args.folder, hosts=args.host, days=args.days)
    print("\n".join(f"wrote {path}" for path in written) or f"{args.folder} has all certificates already")
    return 0


def _check_host(host: str) -> None:
    if _NAME.fullmatch(host):
        return
    try:
        ip_address(host)
    except ValueError:
        raise InvalidRequest(f"host is {quote(host)}; give IP addresses, or names of ASCII such as a.example") from None
