"""Command-line flags that several subcommands share, and how they become settings.

Flags carry vLLM's names; ``--a_b`` and ``--a-b`` are the same flag. Every default is read from
:mod:`specdec.settings`, so it is written once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn

from specdec.errors import InvalidRequest
from specdec.sessions import Rule
from specdec.settings import DTYPES, ModelSettings, SchedulerSettings

#: Older vLLM flags, gone or without a meaning here, that old command lines still carry: (flag, takes a value).
IGNORED_FLAGS = (
    ("--use-v2-block-manager", False),
    ("--disable-log-requests", False),
    ("--disable-log-stats", False),
    ("--enable-chunked-prefill", False),
    ("--enable-prefix-caching", False),
    ("--swap-space", True),
)


class Parser(argparse.ArgumentParser):
    """An argument parser that takes underscores for hyphens in flag names and reports errors in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse after spelling every flag with hyphens."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(hyphenate(given), namespace)

    def error(self, message: str) -> NoReturn:
        """Leave with one line and exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def hyphenate(args: Sequence[str]) -> list[str]:
    """``--speculative_config=x_y`` → ``--speculative-config=x_y``; what follows a lone ``--`` is left alone."""
    result: list[str] = []
    for index, arg in enumerate(args):
        if arg == "--":
            return [*result, *args[index:]]
        name, equals, value = arg.partition("=")
        result.append(name.replace("_", "-") + equals + value if name.startswith("--") else arg)
    return result


def default_of(settings: type, name: str) -> Any:
    """The default of one field of a settings class."""
    return next(field.default for field in fields(settings) if field.name == name)


def _add(group: Any, settings: type, flag: str, *aliases: str, text: str, **kwargs: Any) -> None:
    default = default_of(settings, flag.removeprefix("--").replace("-", "_"))
    shown = "" if default is None or default is False else f" (default: {default})"
    group.add_argument(flag, *aliases, default=default, help=text + shown, **kwargs)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :class:`ModelSettings` that fit a target and its draft."""
    group = parser.add_argument_group("model")
    add = partial(_add, group, ModelSettings)
    add("--tokenizer", text="folder or hub name of the tokenizer; the model's own where not given")
    add("--dtype", choices=DTYPES, text="type of weights and activations")
    add("--device", text='"auto", "cpu" or "cuda:N"')
    add("--max-model-len", type=int, text="longest sequence in tokens; the checkpoint's where not given")
    add("--gpu-memory-utilization", type=float, text="share of a GPU's memory for weights and KV cache")
    add("--kv-cache-memory-bytes", type=int, text="bytes of the target's KV cache; overrides the share")
    add("--block-size", type=int, text="tokens per KV block")
    add("--num-threads", type=int, text="threads of the target's forward pass on a CPU; all cores where not given")
    add("--tensor-parallel-size", "-tp", type=int, text="devices a model is split over; only 1 so far")
    add("--trust-remote-code", action="store_true", text="run model code that comes with the checkpoint")
    add("--enforce-eager", action="store_true", text="run the model's own modules even where a faster path exists")
    group.add_argument("--seed", type=int, help="makes the seeds of requests that give none reproducible")


def add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of :class:`SchedulerSettings` and the verification rule."""
    group = parser.add_argument_group("scheduling and verification")
    _add(group, SchedulerSettings, "--max-num-seqs", type=int, text="sessions open at once")
    _add(group, SchedulerSettings, "--max-num-batched-tokens", type=int, text="tokens fed per step")
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


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Accept flags of old vLLM command lines that change nothing here."""
    for flag, takes_value in IGNORED_FLAGS:
        if takes_value:
            parser.add_argument(flag, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def model_settings_of(args: argparse.Namespace, model: str) -> ModelSettings:
    """The target's settings from parsed flags; ``model`` is its folder."""
    names = {field.name for field in fields(ModelSettings)} - {"model"}
    given = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return ModelSettings(model=model, **given)


def scheduler_settings_of(args: argparse.Namespace) -> SchedulerSettings:
    """The scheduler's settings from parsed flags."""
    names = {field.name for field in fields(SchedulerSettings)}
    return SchedulerSettings(**{name: value for name, value in vars(args).items() if name in names})


def rule_of(name: str | None) -> Rule | None:
    """The verification rule of a name; None stays None."""
    if name is None:
        return None
    try:
        return Rule(name)
    except ValueError:
        rules = ", ".join(Rule)
        raise InvalidRequest(f"verification is {name!r}; choose one of {rules}", param="verification") from None
