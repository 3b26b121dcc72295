"""The target service as a process, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from specdec.errors import InvalidRequest
from specdec.rpc.runner import run
from specdec.rpc.server import RpcServer
from specdec.sampling.rule import Rule
from specdec.settings import DTYPES, ModelSettings, SchedulerSettings, ServerSettings, TargetSettings
from specdec.v1 import target_service_pb2 as pb
from specdec.v1.target_service_pb2_grpc import add_TargetServiceServicer_to_server
from target_service.core import TargetCore
from target_service.servicer import TargetServicer


class TargetService:
    """What the process serves; see :class:`specdec.rpc.runner.Service`."""

    name = "target"

    def __init__(self, settings: TargetSettings) -> None:
        self._settings = settings
        self._servicer = TargetServicer()

    def register(self, server: RpcServer) -> None:
        """Add the servicer."""
        name = pb.DESCRIPTOR.services_by_name["TargetService"].full_name
        server.add(add_TargetServiceServicer_to_server, self._servicer, name)

    async def start(self) -> None:
        """Load and warm up the model."""
        self._servicer.core = await TargetCore.start(self._settings)

    async def drain(self) -> None:
        """Open no new sessions."""
        if self._servicer.core is not None:
            self._servicer.core.drain()

    async def stop(self) -> None:
        """Release everything."""
        if self._servicer.core is not None:
            await self._servicer.core.close()


#: Flags by the settings class that holds their default: (field, type, help).
_FLAGS: Final[tuple[tuple[str, type[Any], tuple[tuple[str, type, str], ...]], ...]] = (
    (
        "model",
        ModelSettings,
        (
            ("tokenizer", str, "folder of the tokenizer; the model's own where not given"),
            ("dtype", str, "type of weights and activations: " + ", ".join(DTYPES)),
            ("device", str, '"auto", "cpu" or "cuda:N"'),
            ("max_model_len", int, "longest sequence in tokens; the checkpoint's where not given"),
            ("gpu_memory_utilization", float, "share of a GPU's memory for weights and KV cache"),
            ("cpu_kv_cache_share", float, "share of the machine's memory for the KV cache on a CPU"),
            ("kv_cache_memory_bytes", int, "bytes of KV cache; overrides the shares"),
            ("block_size", int, "tokens per KV block"),
            ("num_threads", int, "threads of the forward pass on a CPU; all cores where not given"),
            ("tensor_parallel_size", int, "devices the model is split over; only 1 so far"),
            ("trust_remote_code", bool, "run model code that comes with the checkpoint"),
            ("enforce_eager", bool, "run the model's own modules even where a faster path exists"),
            ("seed", int, "key for noise that no request seeds"),
        ),
    ),
    (
        "scheduling",
        SchedulerSettings,
        (
            ("max_num_seqs", int, "sessions open at once"),
            ("max_num_batched_tokens", int, "tokens fed per tick"),
            ("max_waiting", int, "sessions waiting to be admitted"),
            ("max_wait_s", float, "seconds a session waits to be admitted"),
            ("park_ttl_s", float, "seconds a parked session is kept"),
        ),
    ),
    (
        "server",
        ServerSettings,
        (
            ("host", str, "address to listen on"),
            ("port", int, "port to listen on; 0 takes a free one"),
            ("drain_s", float, "seconds open streams get to finish after SIGTERM"),
            ("max_concurrent_rpcs", int, "streams and calls at once"),
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the service's flags; their defaults are those of the settings classes."""
    parser.add_argument("--model", required=True, help="folder of the model's checkpoint")
    rule = next(field.default for field in fields(TargetSettings) if field.name == "verification")
    parser.add_argument(
        "--verification",
        choices=[str(choice) for choice in Rule],
        default=str(rule),
        help=f"rule for sessions that name none (default: {rule})",
    )
    for title, settings, flags in _FLAGS:
        group = parser.add_argument_group(title)
        defaults = {field.name: field.default for field in fields(settings)}
        for name, kind, text in flags:
            flag, default = "--" + name.replace("_", "-"), defaults[name]
            if kind is bool:
                group.add_argument(flag, action="store_true", default=default, help=text)
            else:
                shown = "" if default is None else f" (default: {default})"
                group.add_argument(flag, type=kind, default=default, help=text + shown)


def settings_of(args: argparse.Namespace) -> tuple[TargetSettings, ServerSettings]:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    values = {settings: {name: getattr(args, name) for name, _, _ in flags} for _, settings, flags in _FLAGS}
    target = TargetSettings(
        model=ModelSettings(model=args.model, **values[ModelSettings]),
        scheduler=SchedulerSettings(**values[SchedulerSettings]),
        verification=Rule(args.verification),
    )
    return target, ServerSettings(**values[ServerSettings])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = argparse.ArgumentParser("target_service", description="Score proposals with the target model.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        target, server = settings_of(args)
    except InvalidRequest as error:
        parser.error(str(error))
    return run(lambda: TargetService(target), server)
