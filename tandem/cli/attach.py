"""``tandem attach``: bring the draft for one's own requests to a server elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engine.refused_checkpoints import check_checkpoint
from specdec.errors import InvalidRequest, ModelNotSupported
from specdec.flags import Parser, add_flags, add_grouped_flags, settings_from
from specdec.methods import method_of
from specdec.process.imports import large_imports
from specdec.process.lifecycle import run_main, run_until_stopped
from specdec.settings import DraftSettings, ModelSettings, SchedulerSettings, SpeculativeSettings
from specdec.settings.listening import TlsFiles
from tandem.cli.flags import add_key_flag, client_key
from tandem.launcher.environment import tune_environment

if TYPE_CHECKING:  # it loads torch
    import grpc.aio

    from draft_service.core import DraftCore

#: Where a gateway listens for gRPC unless it is told otherwise.
DEFAULT_PORT: Final = 50051


def add_arguments(parser: Parser) -> None:
    """The flags of ``tandem attach``."""
    parser.add_argument("--server", metavar="HOST[:PORT]", required=True, help="gRPC address of the gateway")
    parser.add_argument("--draft", metavar="MODEL", help="folder, .gguf file or hub name of the draft model")
    parser.add_argument("--prediction", metavar="FILE", type=Path, help="expected text; sent again when it changes")
    parser.add_argument("--token", help="32 to 128 letters, digits, - or _ (random by default)")
    add_key_flag(parser)
    group = parser.group("TLS")
    group.add_argument("--tls", action="store_true", help="use TLS, with the CAs of this system or --ssl-ca-certs")
    for name, text in (("ca-certs", "PEM file of CAs"), ("certfile", "certificate to show"), ("keyfile", "its key")):
        group.add_argument(f"--ssl-{name}", metavar="FILE", help=text)
    add_flags(parser.group("speculation"), SpeculativeSettings, "num_speculative_tokens")
    add_grouped_flags(parser, ModelSettings, skip=("model",))
    add_grouped_flags(parser, SchedulerSettings)


def run(args: argparse.Namespace) -> int:
    """Draft until SIGINT or SIGTERM."""
    if args.draft is None and args.prediction is None:
        raise InvalidRequest("nothing to attach; give --draft MODEL, --prediction FILE or both")
    settings = None if args.draft is None else _settings(args)
    tune_environment()
    stop = asyncio.Event()
    process = AttachProcess(args, settings, stop)
    run_main(lambda: run_until_stopped(process, on_ready=process.print_ready, stop=stop))
    return 0


def _settings(args: argparse.Namespace) -> DraftSettings:
    from tandem.checkpoints import find_checkpoint  # noqa: PLC0415 (`tandem --help` needs none)

    args.model = find_checkpoint(args.draft)
    check_checkpoint(args.model)
    if (method := method_of(args.model)) != "draft_model":
        raise InvalidRequest(f"{args.draft} is for {method}, which reads states of the target; attach a draft model")
    return DraftSettings(
        speculative=settings_from(SpeculativeSettings, args, method="draft_model"),
        model=settings_from(ModelSettings, args),
        scheduler=settings_from(SchedulerSettings, args),
    )


class AttachProcess:
    """Loads the draft, dials the gateway and drafts until it is stopped or refused."""

    def __init__(self, args: argparse.Namespace, settings: DraftSettings | None, stop: asyncio.Event) -> None:
        """``settings``: those of the draft; None: there is none. ``stop`` is set where the process ends by itself."""
        _, colon, port = args.server.rpartition(":")
        self._address = args.server if colon and port.isdecimal() else f"{args.server}:{DEFAULT_PORT}"
        self._args = args
        self._settings = settings
        self._stop = stop
        self._token = args.token or secrets.token_urlsafe(32)
        self._channel: grpc.aio.Channel | None = None
        self._core: DraftCore | None = None
        self._task: asyncio.Task[None] | None = None
        self._failing: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        """Return once the gateway has accepted the draft."""
        with large_imports():
            from draft_service.attaching import AttachedDraft  # noqa: PLC0415
            from draft_service.core import DraftCore  # noqa: PLC0415
            from specdec.rpc.certificates import Certificates  # noqa: PLC0415
            from specdec.rpc.channel import open_channel  # noqa: PLC0415
            from specdec.v1.generation_service_pb2_grpc import GenerationServiceStub  # noqa: PLC0415

        if self._settings is not None:
            self._core = await DraftCore.start(self._settings)
            if not self._core.drafter.streams:
                raise ModelNotSupported(
                    f"{self._args.draft} drafts no streams; attach a model without recurrent layers"
                )
        args, key = self._args, client_key(self._args)
        files = TlsFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
        certificates = Certificates(files) if args.tls or files else None
        self._channel = open_channel(self._address, certificates=certificates)
        call = GenerationServiceStub(self._channel).AttachDraft
        metadata = (("authorization", f"Bearer {key}"),) if key else None
        draft = AttachedDraft(
            lambda: call(metadata=metadata), self._address, self._token, core=self._core, prediction=args.prediction
        )
        self._task = asyncio.create_task(draft.run())
        self._task.add_done_callback(lambda _: self._stop.set())
        attached = asyncio.create_task(draft.attached.wait())
        await asyncio.wait((self._task, attached), return_when=asyncio.FIRST_COMPLETED)
        attached.cancel()
        await self.drain()
        if self._core is not None:
            self._failing = asyncio.create_task(self._core.failed.wait())
            self._failing.add_done_callback(lambda _: self._stop.set())

    def print_ready(self) -> None:
        """Print what requests have to name."""
        line = {"event": "ready", "service": "attach", "server": self._address, "x-draft-attachment": self._token}
        print(json.dumps(line), flush=True)

    async def drain(self) -> None:
        """Raise what ended the attachment, if anything did."""
        if self._core is not None and self._core.failure is not None:
            raise self._core.failure
        if self._task is not None and self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Hang up and release the draft."""
        for task in (self._task, self._failing):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        if self._channel is not None:
            await self._channel.close()
        if self._core is not None:
            await self._core.close()
