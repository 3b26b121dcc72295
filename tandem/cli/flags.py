"""Flags that several commands share, vLLM's older ones among them."""

from __future__ import annotations

import argparse

from specdec.flags import add_flags, flag_of
from specdec.settings import GatewaySettings, ModelSettings, SchedulerSettings
from tandem.launcher.deployment import DERIVED_OPTIONS, SERVER_OPTIONS
from tandem.speculative_config import OLDER_NAMES

#: Older vLLM flags, gone or without a meaning here, that old command lines still carry: (flag, takes a value).
IGNORED_FLAGS = (
    ("--use-v2-block-manager", False),
    ("--disable-log-requests", False),
    ("--disable-log-stats", False),
    ("--enable-chunked-prefill", False),
    ("--enable-prefix-caching", False),
    ("--swap-space", True),
)


def add_deployment_flags(parser: argparse.ArgumentParser) -> None:
    """What the target, its drafter and the gateway's decoding are told, wherever they run."""
    group = parser.add_argument_group("model")
    add_flags(group, ModelSettings, skip=("model",), aliases={"tensor_parallel_size": "-tp"})
    group = parser.add_argument_group("scheduling")
    add_flags(group, SchedulerSettings, "max_num_seqs", "max_num_batched_tokens")
    group = parser.add_argument_group("decoding")
    add_flags(group, GatewaySettings, skip={*DERIVED_OPTIONS, *SERVER_OPTIONS})
    _add_speculation_flags(parser.add_argument_group("speculation"))


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
        is_text = key == "model"
        group.add_argument(
            flag_of(name),
            type=str if is_text else int,
            metavar="MODEL" if is_text else "N",
            help=f'older spelling of --speculative-config\'s "{key}"'
            + ('; "[ngram]" needs no model' if is_text else ""),
        )


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Accept flags of old vLLM command lines that change nothing here."""
    for flag, takes_value in IGNORED_FLAGS:
        if takes_value:
            parser.add_argument(flag, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
