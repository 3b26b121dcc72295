"""The ``tandem`` command. Each subcommand is a module with ``add_arguments`` and ``run``, imported when chosen."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from specdec import __version__
from specdec.errors import InvalidRequest, TandemError, text_of
from specdec.flags import Parser
from tandem.cli.services import SERVICES, run_service

#: Subcommand → its module and what it does.
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "serve": ("tandem.cli.serve", "start target, draft and gateway on this machine"),
    "generate": ("tandem.cli.generate", "continue a prompt and stream the text"),
    "chat": ("tandem.cli.chat", "chat with a model in the terminal"),
    "bench": ("tandem.cli.bench", "compare plain and speculative decoding"),
    "attach": ("tandem.cli.attach", "bring the draft for one's own requests to a server elsewhere"),
    "models": ("tandem.cli.models", "list the checkpoints on this machine"),
    "pull": ("tandem.cli.pull", "download a checkpoint from the Hugging Face hub"),
    "health": ("tandem.cli.health", "ask a running server whether it is ready"),
    "key": ("tandem.cli.key", "make an API key and its line of a key file"),
    "train": ("tandem.cli.train", "train a drafter for a target: a draft head or a small model"),
    "export-mtp": ("tandem.cli.export_mtp", "take the prediction layers out of a target, for a draft elsewhere"),
    "certs": ("tandem.cli.certs", "make a CA and certificates for the services"),
    "demo": ("tandem.cli.demo", "start the services, generate a few texts, stop"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 for a failure, 2 for a mistake in the call."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given and given[0] in SERVICES:
            return run_service(given[0], given[1:])
        return _run_command(given)
    except TandemError as error:
        print(f"tandem: error: {text_of(error)}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output left, as `head` does; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_command(argv: Sequence[str]) -> int:
    parser = Parser(prog="tandem", description="Speculative decoding as a service.")
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command, chosen = None, parser
    for name, (module, text) in {**COMMANDS, **SERVICES}.items():
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if argv and argv[0] == name:
            command = importlib.import_module(module)
            command.add_arguments(subparser)
            chosen = subparser
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        chosen.refuse(unknown)
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    status: int = command.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
