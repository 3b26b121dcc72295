"""``tandem health``: whether a server is ready, and what it serves."""

from __future__ import annotations

import argparse

from tandem.client import Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem health``."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="seconds to wait for an answer (default: 5)")


def run(args: argparse.Namespace) -> int:
    """Print one line; 0 when the server is ready."""
    server = Server(args.url, timeout_s=args.timeout_s)
    server.get("/health")
    models = ", ".join(str(model["id"]) for model in server.get("/v1/models")["data"])
    print(f"{server.url} is ready and serves {models}")
    return 0
