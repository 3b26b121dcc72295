"""The target service as a process, and its command line."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.refused_checkpoints import check_checkpoint
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.flags import Parser, add_grouped_flags, settings_from
from specdec.process.imports import large_imports
from specdec.process.logs import start_log
from specdec.settings import ModelSettings, SchedulerSettings, ServerSettings, TargetSettings

if TYPE_CHECKING:
    from engine.parallel.ranks import Place
    from specdec.rpc.core_service import CoreService
    from target_service.core import TargetCore

logger = logging.getLogger(__name__)


def make_service(settings: TargetSettings, place: Place | None) -> CoreService[TargetCore]:
    """What the process serves."""
    # Importing torch takes seconds: settings are checked before.
    with large_imports():
        from specdec.rpc.core_service import CoreService  # noqa: PLC0415
        from specdec.v1 import target_service_pb2 as pb  # noqa: PLC0415
        from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server  # noqa: PLC0415
        from target_service.core import TargetCore  # noqa: PLC0415
        from target_service.servicer import TargetServicer  # noqa: PLC0415

    return CoreService(
        "target",
        TargetServicer(),
        add_TargetServiceServicer_to_server,
        pb.DESCRIPTOR.services_by_name["TargetService"].full_name,
        lambda: TargetCore.start(settings, place, _end_process),
    )


def _end_process(reason: str) -> None:
    """End at once: sessions continue on another replica, or here after a restart."""
    logger.error("%s; this target ends", reason)
    os._exit(1)


def add_arguments(parser: Parser) -> None:
    """Add the service's flags; their defaults are those of the settings classes."""
    add_grouped_flags(parser, ModelSettings, aliases={"tensor_parallel_size": "-tp"})
    add_grouped_flags(parser, TargetSettings)
    add_grouped_flags(parser, SchedulerSettings)
    add_grouped_flags(parser, ServerSettings)


def settings_of(args: argparse.Namespace) -> tuple[TargetSettings, ServerSettings]:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field. Or the checkpoint is damaged.
        ModelNotSupported: the checkpoint is of a format that is refused.
    """
    server = settings_from(ServerSettings, args)
    target = settings_from(
        TargetSettings,
        args,
        model=settings_from(ModelSettings, args),
        scheduler=settings_from(SchedulerSettings, args),
    )
    check_checkpoint(target.model.model)
    return target, server


def main(argv: Sequence[str] | None = None, *, prog: str = "tandem target") -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = Parser(prog, description="Run one target service: it verifies proposals and owns the text.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        target, server = settings_of(args)
    except (InvalidRequest, ModelNotSupported) as error:
        parser.error(str(error))
    start_log(server.log_level, server.log_format)
    logger.info("target: starting with %s", target.model.model)
    # Importing torch takes seconds.
    with large_imports():
        from engine.parallel.ranks import Place  # noqa: PLC0415
        from specdec.rpc.lifecycle import run  # noqa: PLC0415
        from target_service.rank_processes import run_follower  # noqa: PLC0415

    try:
        place = Place.of(os.environ, target.model.tensor_parallel_size)
    except InvalidRequest as error:
        parser.error(str(error))
    if place is not None and place.rank:
        return run_follower(
            target.model,
            place,
            log_level=server.log_level,
            log_format=server.log_format,
            num_rows=target.scheduler.max_num_batched_tokens,
        )
    return run(lambda: make_service(target, place), server)
