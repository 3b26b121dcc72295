"""The draft service as a process, and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from draft_service.core import DraftCore
from draft_service.servicer import DraftServicer
from specdec.errors import InvalidRequest
from specdec.rpc.runner import run
from specdec.rpc.server import RpcServer
from specdec.settings import (
    DTYPES,
    METHODS,
    DraftSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
)
from specdec.v1 import draft_service_pb2 as pb
from specdec.v1.draft_service_pb2_grpc import add_DraftServiceServicer_to_server


class DraftService:
    """What the process serves; see :class:`specdec.rpc.runner.Service`."""

    name = "draft"

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings
        self._servicer = DraftServicer()

    def register(self, server: RpcServer) -> None:
        """Add the servicer."""
        name = pb.DESCRIPTOR.services_by_name["DraftService"].full_name
        server.add(add_DraftServiceServicer_to_server, self._servicer, name)

    async def start(self) -> None:
        """Load and warm up the drafter."""
        self._servicer.core = await DraftCore.start(self._settings)

    async def drain(self) -> None:
        """Open no new sessions."""
        if self._servicer.core is not None:
            self._servicer.core.drain()

    async def stop(self) -> None:
        """Release everything."""
        if self._servicer.core is not None:
            await self._servicer.core.close()


#: Flags by the settings class that holds their default: (field, type, help).
_FLAGS: tuple[tuple[str, type[Any], tuple[tuple[str, type, str], ...]], ...] = (
    (
        "speculation",
        SpeculativeSettings,
        (
            ("num_speculative_tokens", int, "drafted tokens a round at most"),
            ("prompt_lookup_max", int, "ngram: longest n-gram looked up"),
            ("prompt_lookup_min", int, "ngram: shortest n-gram looked up"),
        ),
    ),
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
            ("trust_remote_code", bool, "run model code that comes with the checkpoint"),
            ("enforce_eager", bool, "run the model's own modules even where a faster path exists"),
        ),
    ),
    (
        "scheduling",
        SchedulerSettings,
        (
            ("max_num_seqs", int, "sessions open at once"),
            ("max_num_batched_tokens", int, "tokens taken in per step"),
            ("max_waiting", int, "sessions waiting to be admitted"),
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
    parser.add_argument("--model", help="folder of the draft model's checkpoint")
    parser.add_argument("--method", choices=METHODS, help="how to draft (default: draft_model with --model, else none)")
    for title, settings, flags in _FLAGS:
        group = parser.add_argument_group(title)
        defaults = {field.name: field.default for field in fields(settings)}
        for name, kind, text in flags:
            default = defaults[name]
            assert default is not MISSING
            flag = "--" + name.replace("_", "-")
            if kind is bool:
                group.add_argument(flag, action="store_true", default=default, help=text)
            else:
                shown = "" if default is None else f" (default: {default})"
                group.add_argument(flag, type=kind, default=default, help=text + shown)


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``python -m draft_service``."""
    parser = argparse.ArgumentParser("draft_service", description="Propose tokens for a target service.")
    add_arguments(parser)
    return parser


def settings_of(args: argparse.Namespace) -> tuple[DraftSettings, ServerSettings]:
    """The settings that parsed flags stand for.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    values = {settings: {name: getattr(args, name) for name, _, _ in flags} for _, settings, flags in _FLAGS}
    speculative = SpeculativeSettings(model=args.model, method=args.method, **values[SpeculativeSettings])
    needs_model = speculative.method == "draft_model"
    draft = DraftSettings(
        speculative=speculative,
        model=ModelSettings(model=args.model, **values[ModelSettings]) if needs_model else None,
        scheduler=SchedulerSettings(**values[SchedulerSettings]),
    )
    return draft, ServerSettings(**values[ServerSettings])


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        draft, server = settings_of(args)
    except InvalidRequest as error:
        parser.error(str(error))
    return run(lambda: DraftService(draft), server)
