"""Flags that several commands share."""

from __future__ import annotations

import argparse
from typing import Final

from specdec.flags import Parser, add_flags, add_grouped_flags, flag_of, from_environment
from specdec.settings import API_KEY_VARIABLE, GatewaySettings, ModelSettings, SchedulerSettings
from tandem.launcher.deployment import DERIVED_OPTIONS, SERVER_OPTIONS
from tandem.speculative_config import OLDER_NAMES

#: Options of the scheduler that one machine needs.
_SCHEDULING: Final = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")


def add_deployment_flags(parser: Parser) -> None:
    """What the target, its drafter and the gateway's decoding are told, wherever they run."""
    _add_speculation_flags(parser.group("speculation"))
    add_grouped_flags(parser, ModelSettings, skip=("model",), aliases={"tensor_parallel_size": "-tp"})
    add_grouped_flags(parser, GatewaySettings, skip={*DERIVED_OPTIONS, *SERVER_OPTIONS})
    add_flags(parser.group("scheduling"), SchedulerSettings, *_SCHEDULING)


def add_key_flag(parser: argparse._ActionsContainer) -> None:
    """The key that a command shows to a server. It is not an option of the server that other flags may start."""
    parser.add_argument(
        "--api-key",
        dest="client_key",
        metavar="KEY",
        help="key for the server at the address given (or TANDEM_API_KEY)",
    )


def client_key(args: argparse.Namespace) -> str | None:
    """The key to show to a server: the flag's, or the first of the environment's."""
    key: str | None = args.client_key or (next(iter(from_environment(API_KEY_VARIABLE)), None) or None)
    return key


def _add_speculation_flags(group: argparse._ArgumentGroup) -> None:
    """``--speculative-config`` and the older flags it replaced."""
    group.add_argument(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='vLLM\'s object, such as \'{"model": "…", "num_speculative_tokens": 5}\' or '
        '\'{"method": "ngram", "prompt_lookup_max": 4}\'',
    )
    for name, key in OLDER_NAMES.items():
        is_text = key in ("model", "method")
        group.add_argument(
            flag_of(name),
            type=str if is_text else int,
            metavar=key.upper() if is_text else "N",
            help=f'"{key}" of --speculative-config' + ('; "[ngram]" needs no model' if key == "model" else ""),
        )
