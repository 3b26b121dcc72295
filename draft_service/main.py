"""The draft service as a process, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.flags import Parser, add_grouped_flags, settings_from
from specdec.methods import method_of
from specdec.rpc.core_service import CoreService
from specdec.rpc.lifecycle import run
from specdec.settings import (
    DraftSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
)
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server


def make_service(settings: DraftSettings) -> CoreService[DraftCore]:
    """What the process serves."""
    return CoreService(
        "draft",
        DraftServicer(),
        add_DraftServiceServicer_to_server,
        pb.DESCRIPTOR.services_by_name["DraftService"].full_name,
        lambda: DraftCore.start(settings),
    )


def add_arguments(parser: Parser) -> None:
    """Add the service's flags; their defaults are those of the settings classes."""
    add_grouped_flags(parser, SpeculativeSettings)
    add_grouped_flags(parser, DraftSettings)
    add_grouped_flags(parser, ModelSettings, skip=("model",))
    add_grouped_flags(parser, SchedulerSettings)
    add_grouped_flags(parser, ServerSettings)


def build_parser(prog: str = "tandem draft") -> argparse.ArgumentParser:
    """The command line of ``python -m draft_service``."""
    parser = Parser(prog, description="Run one draft service: it proposes tokens.")
    add_arguments(parser)
    return parser


def settings_of(args: argparse.Namespace) -> tuple[DraftSettings, ServerSettings]:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
        ModelNotSupported: the checkpoint is made for a method that is not known.
    """
    method = args.method or (method_of(args.model) if args.model else None)
    speculative = settings_from(SpeculativeSettings, args, method=method)
    draft = settings_from(
        DraftSettings,
        args,
        speculative=speculative,
        model=settings_from(ModelSettings, args) if speculative.needs_model else None,
        scheduler=settings_from(SchedulerSettings, args),
    )
    return draft, settings_from(ServerSettings, args)


def main(argv: Sequence[str] | None = None, *, prog: str = "draft_service") -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    try:
        draft, server = settings_of(args)
    except (InvalidRequest, ModelNotSupported) as error:
        parser.error(str(error))
    return run(lambda: make_service(draft), server)
