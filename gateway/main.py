"""The gateway's command line."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from gateway.backends.discovery import source_of
from specdec.errors import InvalidRequest, TandemError
from specdec.flags import Parser, add_grouped_flags, settings_from
from specdec.process.lifecycle import run_main
from specdec.process.logs import start_log
from specdec.settings import GatewaySettings, LookupSettings

logger = logging.getLogger(__name__)


def add_arguments(parser: Parser) -> None:
    """Add the gateway's flags; their defaults are those of :class:`GatewaySettings`."""
    add_grouped_flags(parser, GatewaySettings)
    add_grouped_flags(parser, LookupSettings)


def settings_of(args: argparse.Namespace) -> GatewaySettings:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: an address is neither ``host:port`` nor a Unix domain socket.
    """
    return settings_from(
        GatewaySettings,
        args,
        targets=_addresses("targets", args.targets),
        drafts=_addresses("drafts", args.drafts),
        lookup_settings=settings_from(LookupSettings, args),
    )


def _addresses(param: str, given: Sequence[str]) -> tuple[str, ...]:
    addresses = tuple(part.strip() for text in given for part in text.split(",") if part.strip())
    for address in addresses:
        try:
            source_of(address)
        except InvalidRequest as error:
            raise InvalidRequest(f"--{param}: {error}", param=param) from None
    return tuple(dict.fromkeys(addresses))


def main(argv: Sequence[str] | None = None, *, prog: str = "tandem gateway") -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = Parser(prog, description="Run one gateway: it serves clients from targets and drafts.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        gateway_settings = settings_of(args)
        start_log(gateway_settings.log_level, gateway_settings.log_format)
        logger.info("gateway: starting for %s", ", ".join(gateway_settings.targets) or "no target")
        run_main(
            lambda: _serve(gateway_settings),
            log_level=gateway_settings.log_level,
            log_format=gateway_settings.log_format,
        )
    except InvalidRequest as error:
        parser.error(str(error))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: GatewaySettings) -> None:
    from gateway.app import Gateway, serve  # noqa: PLC0415 - Starlette: after the settings have been checked

    await serve(Gateway(settings))
