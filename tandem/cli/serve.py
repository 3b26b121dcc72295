"""``tandem serve``: target, draft and gateway on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from typing import Any

from specdec.errors import InvalidRequest, TandemError
from specdec.flags import add_flags
from specdec.settings import GatewaySettings
from tandem.cli.flags import add_deployment_flags, add_ignored_flags
from tandem.launcher import deployment as deployments
from tandem.launcher.deployment import SERVER_OPTIONS, Deployment
from tandem.launcher.environment import tune_environment
from tandem.launcher.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``tandem serve``."""
    add_model_argument(parser)
    group = parser.add_argument_group("server")
    add_flags(group, GatewaySettings, *SERVER_OPTIONS)
    group.add_argument("--startup-timeout-s", type=float, default=600.0, metavar="X", help="seconds to load")
    group.add_argument("--embedded", action="store_true", help="run everything in one process, no gRPC in between")
    add_deployment_flags(parser)
    add_ignored_flags(parser)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """MODEL, or ``--model`` as in older command lines."""
    parser.add_argument(
        "model_argument",
        metavar="MODEL",
        nargs="?",
        help="folder or hub name of the target; without it the bundled pair is served",
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
    deployment = deployments.deployment_of(args).with_ports()
    if args.embedded:
        tune_environment()
        from tandem.launcher.embedded import serve_embedded  # noqa: PLC0415 (torch)

        return serve_embedded(deployment)
    return asyncio.run(serve(deployment, startup_timeout_s=args.startup_timeout_s))


async def serve(deployment: Deployment, *, startup_timeout_s: float) -> int:
    """Run the processes until SIGINT or SIGTERM; a second signal kills them."""
    services = deployments.services_of(deployment)
    supervisor = Supervisor(services, drain_s=deployment.gateway.drain_s, startup_timeout_s=startup_timeout_s)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    try:
        if await _first(supervisor.start(), stop.wait()):
            addresses = {service.name: service.address for service in services if service.name != "gateway"}
            print(deployment.ready_line(addresses), flush=True)
            await stop.wait()
    except TandemError:
        await supervisor.kill()
        raise
    if not await _first(supervisor.stop(), hurry.wait()):
        await supervisor.kill()
    return 0


async def _first(work: Any, other: Any) -> bool:
    """Await ``work``, cancelled as soon as ``other`` ends; True when it came to its end."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(other)
    await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    done: bool = task.done()
    if not done:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return done
