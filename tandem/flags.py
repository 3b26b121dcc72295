"""Command-line flags that several subcommands share, vLLM's older ones among them."""

from __future__ import annotations

import argparse

from specdec.errors import InvalidRequest
from specdec.flags import HELP, add_flags
from specdec.rules import Rule
from specdec.settings import GatewaySettings, ModelSettings, SchedulerSettings

#: Older vLLM flags, gone or without a meaning here, that old command lines still carry: (flag, takes a value).
IGNORED_FLAGS = (
    ("--use-v2-block-manager", False),
    ("--disable-log-requests", False),
    ("--disable-log-stats", False),
    ("--enable-chunked-prefill", False),
    ("--enable-prefix-caching", False),
    ("--swap-space", True),
)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :class:`ModelSettings` that fit a target and its draft."""
    names = [name for name in HELP[ModelSettings] if name != "cpu_kv_cache_share"]
    add_flags(
        parser.add_argument_group("model"),
        ModelSettings,
        *names,
        aliases={"tensor_parallel_size": "-tp"},
        texts={
            "tokenizer": "folder or hub name of the tokenizer; the model's own where not given",
            "kv_cache_memory_bytes": "bytes of the target's KV cache; overrides the share",
            "num_threads": "threads of the target's forward pass on a CPU; all cores where not given",
        },
    )
    add_flags(parser, GatewaySettings, "seed")


def add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :class:`SchedulerSettings` and the verification rule."""
    group = parser.add_argument_group("scheduling and verification")
    add_flags(group, SchedulerSettings, "max_num_seqs", "max_num_batched_tokens")
    group.add_argument(
        "--verification",
        choices=[str(rule) for rule in Rule],
        help="rule that accepts or rejects drafted tokens (default: block, and coupled for requests with a seed)",
    )


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """``--speculative-config`` and the older flags it replaced."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='vLLM\'s object, such as \'{"model": "…", "num_speculative_tokens": 5}\' or '
        '\'{"method": "ngram", "prompt_lookup_max": 4}\'',
    )
    older = "older spelling of --speculative-config's "
    group.add_argument("--speculative-model", metavar="MODEL", help=older + '"model"; "[ngram]" needs no model')
    for flag, key in (
        ("--num-speculative-tokens", "num_speculative_tokens"),
        ("--ngram-prompt-lookup-max", "prompt_lookup_max"),
        ("--ngram-prompt-lookup-min", "prompt_lookup_min"),
        ("--speculative-draft-tensor-parallel-size", "draft_tensor_parallel_size"),
        ("--speculative-disable-by-batch-size", "disable_by_batch_size"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=f'{older}"{key}"')
    add_flags(group, GatewaySettings, "fixed_draft_length", "num_ahead_proposals", "min_offer_likelihood")


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Accept flags of old vLLM command lines that change nothing here."""
    for flag, takes_value in IGNORED_FLAGS:
        if takes_value:
            parser.add_argument(flag, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def rule_of(name: str | None) -> Rule | None:
    """The verification rule of a name; None stays None."""
    if name is None:
        return None
    try:
        return Rule(name)
    except ValueError:
        rules = ", ".join(Rule)
        raise InvalidRequest(f"verification is {name!r}; choose one of {rules}", param="verification") from None
