"""``tandem key``: make an API key, and its line of a key file."""

from __future__ import annotations

import argparse
import json
import secrets
import sys

from gateway.access.keys import check_key_name, digest_of
from specdec.flags import add_flags, settings_from
from specdec.settings import ClientLimits
from specdec.settings.option import options_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem key``."""
    parser.add_argument("name", metavar="NAME", help="what metrics and logs call the key")
    add_flags(parser, ClientLimits)


def run(args: argparse.Namespace) -> int:
    """Print the line to standard output and the key to standard error; the key is kept nowhere."""
    check_key_name(args.name)
    limits = settings_from(ClientLimits, args)
    given = {name: value for name in options_of(ClientLimits) if (value := getattr(limits, name)) is not None}
    key = f"sk-{secrets.token_urlsafe(32)}"
    print(json.dumps({"name": args.name, "sha256": digest_of(key).hex(), **given}))
    print(f"key of {args.name}, shown this once: {key}", file=sys.stderr)
    return 0
