"""The gateway's command line."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

import uvloop

from gateway.app import Gateway, serve
from specdec.errors import InvalidRequest, TandemError
from specdec.sampling.rule import Rule
from specdec.settings import GatewaySettings

#: Flags: (field of the settings, type, help).
FLAGS: Final[tuple[tuple[str, type, str], ...]] = (
    ("host", str, "address to listen on"),
    ("port", int, "port of the REST API; 0 takes a free one"),
    ("grpc_port", int, "port of the gRPC API; 0 takes a free one"),
    ("tokenizer", str, "folder of the tokenizer; without it only token ids are served"),
    ("chat_template", str, "Jinja text, or a file with it, instead of the tokenizer's own chat template"),
    ("num_speculative_tokens", int, "drafted tokens a round at most; 0 switches speculation off"),
    ("disable_by_batch_size", int, "no drafting while more sequences than this are open"),
    ("request_timeout_s", float, "seconds a request may take when it names no deadline; unlimited where not given"),
    ("draft_timeout_s", float, "seconds a draft may take before the round goes on without it"),
    ("max_target_retries", int, "times a session is opened anew on a target before its request fails"),
    ("max_concurrent_requests", int, "requests in flight; one more gets 429"),
    ("seed", int, "makes the seeds of requests that give none reproducible"),
    ("drain_s", float, "seconds open requests get to finish after SIGTERM"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the gateway's flags; their defaults are those of :class:`GatewaySettings`."""
    many: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--targets", **many, metavar="HOST:PORT,…", help="target replicas; may be given several times (required)"
    )
    parser.add_argument("--drafts", **many, metavar="HOST:PORT,…", help="draft replicas; none serves unspeculatively")
    parser.add_argument(
        "--served-model-name", **many, metavar="NAME", help="name the model answers to (default: the target's own)"
    )
    parser.add_argument(
        "--verification",
        choices=[str(rule) for rule in Rule],
        help="rule for requests without a seed that name none (default: the target's own)",
    )
    defaults = {field.name: field.default for field in fields(GatewaySettings)}
    for name, kind, text in FLAGS:
        default = defaults[name]
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default, help=text + shown)


def settings_of(args: argparse.Namespace) -> GatewaySettings:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: an address is not ``host:port``.
    """
    return GatewaySettings(
        targets=_addresses("targets", args.targets),
        drafts=_addresses("drafts", args.drafts),
        served_model_name=tuple(args.served_model_name),
        verification=None if args.verification is None else Rule(args.verification),
        **{name: getattr(args, name) for name, _, _ in FLAGS},
    )


def _addresses(param: str, given: Sequence[str]) -> tuple[str, ...]:
    addresses = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidRequest(f"{param} holds {address!r}; write each as host:port", param=param)
    return tuple(dict.fromkeys(addresses))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = argparse.ArgumentParser("gateway", description="Serve text from target and draft services.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        gateway_settings = settings_of(args)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(gateway_settings))
    except InvalidRequest as error:
        parser.error(str(error))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: GatewaySettings) -> None:
    await serve(Gateway(settings))
