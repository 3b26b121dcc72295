"""Command-line flags of settings: one place for their help, and every default read from the settings' class.

Flags carry the names of the fields, which are vLLM's where vLLM has the option; ``--a_b`` and ``--a-b`` are the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, Final, NoReturn, TypeVar, get_args, get_type_hints

from specdec.settings import (
    DTYPE_ALIASES,
    DTYPES,
    QUANTIZATIONS,
    GatewaySettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
)

S = TypeVar("S")

HELP: Final[Mapping[type, Mapping[str, str]]] = {
    ModelSettings: {
        "tokenizer": "folder of the tokenizer; the model's own where not given",
        "dtype": "type of weights and activations",
        "quantization": "round the weights of linear layers to 8 bits at load, on a CPU; auto: where that can be done",
        "device": '"auto", "cpu" or "cuda:N"',
        "max_model_len": "longest sequence in tokens; the checkpoint's where not given",
        "gpu_memory_utilization": "share of a GPU's memory for weights, activations and KV cache",
        "cpu_kv_cache_share": "share of the machine's memory for the KV cache on a CPU",
        "kv_cache_memory_bytes": "bytes of KV cache; overrides the shares",
        "block_size": "tokens per KV block",
        "num_threads": "threads of the forward pass on a CPU; all cores where not given",
        "tensor_parallel_size": "devices the model is split over; only 1 so far",
        "trust_remote_code": "run model code that comes with the checkpoint",
        "enforce_eager": "run the model's own modules even where a faster path exists",
    },
    SchedulerSettings: {
        "max_num_seqs": "sessions open at once",
        "max_num_batched_tokens": "tokens fed per step",
        "max_waiting": "sessions waiting to be admitted; one more is refused",
        "max_wait_s": "seconds a session waits to be admitted",
        "park_ttl_s": "seconds a parked session is kept",
    },
    SpeculativeSettings: {
        "num_speculative_tokens": "drafted tokens a round at most",
        "prompt_lookup_max": "ngram: longest n-gram looked up",
        "prompt_lookup_min": "ngram: shortest n-gram looked up",
        "suffix_decoding_max_tree_depth": "suffix: longest run of tokens matched and continued",
        "suffix_decoding_max_cached_requests": "suffix: past requests whose output is kept for all; 0 keeps none",
        "suffix_decoding_max_spec_factor": "suffix: drafted tokens at most, for each one that matched",
        "suffix_decoding_min_token_prob": "suffix: drafts on while the tokens together are at least this likely",
        "tree_top_k": "draft models and heads: children of each token of a drafted tree; 1 drafts chains",
        "tree_depth": "levels of a drafted tree at most; by default half of num_speculative_tokens, 2 to 6",
        "speculative_token_tree": "a static tree instead, such as '[(0,), (1,), (0, 0)]'",
    },
    ServerSettings: {
        "host": "address to listen on",
        "port": "port to listen on; 0 takes a free one",
        "socket": "Unix domain socket to listen on as well: unix:/path or unix-abstract:name",
        "drain_s": "seconds open streams get to finish after SIGTERM",
        "max_concurrent_rpcs": "streams and calls at once",
    },
    GatewaySettings: {
        "host": "address to listen on",
        "port": "port of the REST API; 0 takes a free one",
        "grpc_port": "port of the gRPC API; 0 takes a free one",
        "tokenizer": "folder of the tokenizer; without it only token ids are served",
        "chat_template": "Jinja text, or a file with it, instead of the tokenizer's own chat template",
        "num_speculative_tokens": "drafted tokens a round at most; 0 switches speculation off",
        "num_ahead_proposals": "proposals drafted ahead of each verdict, for a draft with cores or a device of its own",
        "min_offer_likelihood": "how likely a proposal drafted ahead must be to go to the target before its verdict",
        "disable_by_batch_size": "no drafting while more sequences than this are open",
        "fixed_draft_length": "always draft as many tokens as allowed, whether or not they pay off",
        "request_timeout_s": "seconds a request may take when it names no deadline; unlimited where not given",
        "draft_timeout_s": "seconds a draft may take before the round goes on without it",
        "max_target_retries": "times a session is opened anew on a target before its request fails",
        "max_concurrent_requests": "requests in flight; one more gets 429",
        "seed": "makes the seeds of requests that give none reproducible",
        "drain_s": "seconds open requests get to finish after SIGTERM",
    },
}
_CHOICES: Final[Mapping[tuple[type, str], Sequence[str]]] = {
    (ModelSettings, "dtype"): (*DTYPES, *DTYPE_ALIASES),
    (ModelSettings, "quantization"): QUANTIZATIONS,
}


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


def add_flags(
    parser: argparse._ActionsContainer,
    settings: type,
    *names: str,
    aliases: Mapping[str, str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each named field of a settings class (none named: all that have a help text).

    ``aliases`` gives a field a second flag; ``texts`` replaces help texts.
    """
    hints = get_type_hints(settings)
    for name in names or HELP[settings]:
        default = default_of(settings, name)
        shown = "" if default is None or default is False else f" (default: {default})"
        spellings = ["--" + name.replace("_", "-"), *([aliases[name]] if aliases and name in aliases else [])]
        options: dict[str, Any] = {"default": default, "help": (texts or {}).get(name, HELP[settings][name]) + shown}
        if hints[name] is bool:
            options["action"] = "store_true"
        else:
            kinds = [kind for kind in get_args(hints[name]) if kind is not NoneType]
            options["type"] = kinds[0] if kinds else hints[name]
            options["choices"] = _CHOICES.get((settings, name))
        parser.add_argument(*spellings, **options)


def settings_from(settings: type[S], args: argparse.Namespace, **given: Any) -> S:
    """Settings from parsed flags: every field with a help text that the parser knows, and ``given`` ones.

    Raises:
        InvalidRequest: a value is out of range; ``param`` names the field.
    """
    parsed = {name: getattr(args, name) for name in HELP[settings] if hasattr(args, name)}
    return settings(**{**parsed, **given})


def default_of(settings: type, name: str) -> Any:
    """The default of one field of a settings class."""
    default = next(field.default for field in fields(settings) if field.name == name)
    assert default is not MISSING, f"{settings.__name__}.{name} has no default"
    return default
