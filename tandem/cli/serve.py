"""``tandem serve``: target, draft and gateway on this machine."""

from __future__ import annotations

import argparse
import asyncio

from specdec.errors import InvalidRequest
from specdec.flags import Parser, add_grouped_flags, flag_of
from specdec.process.imports import large_imports
from specdec.process.lifecycle import run_until_stopped
from specdec.settings import GatewaySettings
from specdec.settings.option import options_of
from tandem.cli.flags import add_deployment_flags
from tandem.launcher import deployment as deployments
from tandem.launcher.deployment import SERVER_OPTIONS, Deployment
from tandem.launcher.effects import without_effect
from tandem.launcher.environment import tune_environment
from tandem.launcher.socket_folder import socket_folder
from tandem.launcher.supervisor import Log, Supervisor, log_json_to_stderr, log_to_stderr
from tandem.vllm_options import VLLM_OPTIONS, add_vllm_flags, as_flag, notes_on


def add_arguments(parser: Parser) -> None:
    """The flags of ``tandem serve``."""
    add_model_argument(parser)
    add_deployment_flags(parser)
    add_grouped_flags(
        parser,
        GatewaySettings,
        skip={*options_of(GatewaySettings)} - {*SERVER_OPTIONS},
        aliases={"log_requests": flag_of("enable_log_requests")},  # vLLM's name
    )
    group = parser.group("server")
    group.add_argument("--startup-timeout-s", type=float, default=600.0, metavar="X", help="seconds to load")
    group.add_argument("--embedded", action="store_true", help="run everything in one process, no gRPC in between")
    add_vllm_flags(parser)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, or ``--model`` as in older command lines."""
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="folder, .gguf file or hub name of the target; without it the bundled pair is served",
    )
    parser.add_argument("--model", help=argparse.SUPPRESS)


def take_model(args: argparse.Namespace) -> None:
    """Make ``args.model`` the one model given, in either place."""
    positional = args.model_argument
    if args.model and positional and args.model != positional:
        raise InvalidRequest(f"two models are given, {positional} and --model {args.model}; give one")
    args.model = positional or args.model


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; 0 after a clean stop."""
    take_model(args)
    notes = [line for _, line in notes_on({name: getattr(args, name) for name in VLLM_OPTIONS}, as_flag)]
    deployment = deployments.deployment_of(args).with_ports()
    notes += [f"{flag_of(name)}: no effect here: {why}" for name, why in without_effect(deployment)]
    log = log_json_to_stderr if deployment.gateway.log_format == "json" else log_to_stderr
    for note in notes:
        log("serve", note)
    if args.embedded:
        log("tandem", f"starting in this process: {deployment.describe()}")
        tune_environment()
        with large_imports():
            from tandem.launcher.embedded import serve_embedded  # noqa: PLC0415 (torch)

        return serve_embedded(deployment)
    return asyncio.run(serve(deployment, log, startup_timeout_s=args.startup_timeout_s))


async def serve(deployment: Deployment, log: Log, *, startup_timeout_s: float) -> int:
    """Run the processes until SIGINT or SIGTERM; a second signal kills them."""
    with socket_folder() as sockets:
        services = deployments.services_of(deployment, sockets)
        log("tandem", f"starting {', '.join(service.name for service in services)}: {deployment.describe()}")
        drain_s = deployment.gateway.drain_s
        supervisor = Supervisor(services, drain_s=drain_s, startup_timeout_s=startup_timeout_s, log=log)
        addresses = {service.name: service.address for service in services if service.name != "gateway"}
        await run_until_stopped(
            SupervisedProcesses(supervisor), on_ready=lambda: print(deployment.ready_line(addresses), flush=True)
        )
    return 0


class SupervisedProcesses:
    """The services' processes as one."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def start(self) -> None:
        """Return once all services are ready."""
        await self._supervisor.start()

    async def drain(self) -> None:
        """Stop the services in order; open requests finish."""
        await self._supervisor.stop()

    async def close(self) -> None:
        """Kill what still runs."""
        await self._supervisor.kill()
