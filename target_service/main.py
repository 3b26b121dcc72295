"""The target service as a process, and its command line."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

from specdec.engine.parallel.ranks import Place
from specdec.errors import InvalidRequest
from specdec.flags import Parser, add_flags, settings_from
from specdec.rpc.lifecycle import run
from specdec.rpc.server import RpcServer
from specdec.settings import ModelSettings, SchedulerSettings, ServerSettings, TargetSettings
from specdec.v1 import target_service_pb2 as pb
from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.core import TargetCore
from target_service.rank_processes import run_follower
from target_service.servicer import TargetServicer

logger = logging.getLogger(__name__)


class TargetService:
    """What the process serves; see :class:`specdec.rpc.lifecycle.Service`."""

    name = "target"

    def __init__(self, settings: TargetSettings, place: Place | None) -> None:
        self._settings = settings
        self._place = place
        self._servicer = TargetServicer()

    def register(self, server: RpcServer) -> None:
        """Add the servicer."""
        name = pb.DESCRIPTOR.services_by_name["TargetService"].full_name
        server.add(add_TargetServiceServicer_to_server, self._servicer, name)

    async def start(self) -> None:
        """Load and warm up the model."""
        self._servicer.core = await TargetCore.start(self._settings, self._place, _end_process)

    async def drain(self) -> None:
        """Open no new sessions."""
        if self._servicer.core is not None:
            self._servicer.core.drain()

    async def stop(self) -> None:
        """Release everything."""
        if self._servicer.core is not None:
            await self._servicer.core.close()


def _end_process(reason: str) -> None:
    """End at once: sessions continue on another replica, or here after a restart."""
    logger.error("%s; this target ends", reason)
    os._exit(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the service's flags; their defaults are those of the settings classes."""
    add_flags(parser, TargetSettings)
    add_flags(parser.add_argument_group("model"), ModelSettings, aliases={"tensor_parallel_size": "-tp"})
    add_flags(parser.add_argument_group("scheduling"), SchedulerSettings)
    add_flags(parser.add_argument_group("server"), ServerSettings)


def settings_of(args: argparse.Namespace) -> tuple[TargetSettings, ServerSettings]:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    target = settings_from(
        TargetSettings,
        args,
        model=settings_from(ModelSettings, args),
        scheduler=settings_from(SchedulerSettings, args),
    )
    return target, settings_from(ServerSettings, args)


def main(argv: Sequence[str] | None = None, *, prog: str = "target_service") -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = Parser(prog, description="Score proposals with the target model.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        target, server = settings_of(args)
        place = Place.of(os.environ, target.model.tensor_parallel_size)
    except InvalidRequest as error:
        parser.error(str(error))
    if place is not None and place.rank:
        return run_follower(target.model, place, log_level=server.log_level, log_format=server.log_format)
    return run(lambda: TargetService(target, place), server)
