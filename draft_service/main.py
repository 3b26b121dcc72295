"""The draft service as a process, and its command line."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.refused_checkpoints import check_checkpoint
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.flags import Parser, add_grouped_flags, settings_from
from specdec.methods import HEAD_METHODS, check_prediction_layers, method_of
from specdec.process.imports import large_imports
from specdec.process.logs import start_log
from specdec.settings import (
    DraftSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
)

if TYPE_CHECKING:
    from draft_service.core import DraftCore
    from specdec.rpc.core_service import CoreService

logger = logging.getLogger(__name__)


def make_service(settings: DraftSettings) -> CoreService[DraftCore]:
    """What the process serves."""
    # Importing torch takes seconds: settings are checked before.
    with large_imports():
        from draft_service.core import DraftCore  # noqa: PLC0415
        from draft_service.drafters.registry import drafter_class  # noqa: PLC0415
        from draft_service.servicer import DraftServicer  # noqa: PLC0415
        from specdec.rpc.core_service import CoreService  # noqa: PLC0415
        from specdec.v1 import draft_service_pb2 as pb  # noqa: PLC0415
        from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server  # noqa: PLC0415

        for method in settings.speculative.methods:
            drafter_class(method)  # imports torch, if it needs it

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
        ModelNotSupported: the checkpoint is made for a method that is not known, or of a format that is refused.
    """
    method = args.method or (method_of(args.model) if args.model else None)
    if args.model is None and "mtp" in (method or ()):
        args.model = args.target_model  # the target's own layers
    speculative = settings_from(SpeculativeSettings, args, method=method)
    server = settings_from(ServerSettings, args)
    draft = settings_from(
        DraftSettings,
        args,
        speculative=speculative,
        model=settings_from(ModelSettings, args) if speculative.needs_model else None,
        scheduler=settings_from(SchedulerSettings, args),
    )
    if draft.model is not None:
        check_checkpoint(draft.model.model, is_head=any(name in HEAD_METHODS for name in speculative.methods))
        if "mtp" in speculative.methods:
            check_prediction_layers(draft.model.model)
    if draft.target_model is not None:
        check_checkpoint(draft.target_model)
    return draft, server


def main(argv: Sequence[str] | None = None, *, prog: str = "draft_service") -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = build_parser(prog)
    args = parser.parse_args(argv)
    try:
        draft, server = settings_of(args)
    except (InvalidRequest, ModelNotSupported) as error:
        parser.error(str(error))
    start_log(server.log_level, server.log_format)
    drafter = "+".join(draft.speculative.methods)
    logger.info("draft: starting %s", f"{drafter} with {draft.model.model}" if draft.model else drafter)
    from specdec.rpc.lifecycle import run  # noqa: PLC0415

    return run(lambda: make_service(draft), server)
