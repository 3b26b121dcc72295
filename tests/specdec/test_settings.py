"""Options: one line each, checked, and the same as flags and back."""

import argparse
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, ClassVar

import pytest

from specdec.errors import InvalidRequest
from specdec.flags import Parser, add_flags, flags_of, settings_from
from specdec.rules import Rule
from specdec.settings import (
    DraftSettings,
    GatewaySettings,
    LookupSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
    SpeculativeSettings,
    TargetSettings,
)
from specdec.settings.option import Option, groups_of, option, options_of
from tandem.training.settings import TrainSettings

CLASSES = (ModelSettings, SchedulerSettings, SpeculativeSettings, LookupSettings, ServerSettings, GatewaySettings)
ALL = (*CLASSES, TargetSettings, DraftSettings, TrainSettings)
REQUIRED: dict[type, dict[str, Any]] = {ModelSettings: {"model": "m"}}
#: Values that must fit together.
PAIRED: dict[str, dict[str, Any]] = {
    "prompt_lookup_min": {"prompt_lookup_max": 9},
    "speculative_token_tree": {"num_speculative_tokens": 3},
    "host": {"insecure": True},
    "published_host": {"insecure": True},
    "ssl_certfile": {"ssl_keyfile": "key"},
    "ssl_keyfile": {"ssl_certfile": "certificate"},
    "ssl_ca_certs": {"ssl_certfile": "certificate", "ssl_keyfile": "key"},
    "backend_ssl_certfile": {"backend_ssl_keyfile": "key", "backend_ssl_ca_certs": "ca"},
    "backend_ssl_keyfile": {"backend_ssl_certfile": "certificate", "backend_ssl_ca_certs": "ca"},
}


def other_value(option: Option) -> Any:
    """A value that is not the default."""
    chosen: dict[str, Any] = {
        "allowed_origins": ("https://a", "https://b"),
        "forwarded_allow_ips": ("10.0.0.1", "10.1.0.0/16"),
        "method": "ngram",
        "lookup": ("suffix", "ngram"),
        "socket": "unix:/s",
        "speculative_token_tree": "[(0,), (1,), (0, 0)]",
        "autotune": "always",
        "dtype": "bfloat16",
        "hidden_state_dtype": "bfloat16",
        "log_format": "json",
        "log_level": "debug",
        "otlp_traces_endpoint": "http://collector:4317",
        "quantization": "int8",
        "quantized_activations": "float",
        "verification": Rule.COUPLED,
    }
    if option.name in chosen:
        return chosen[option.name]
    by_kind = {bool: True, tuple[str, ...]: ("a", "b"), str: "other", float: 0.5, int: 7}
    return next(value for kind, value in by_kind.items() if kind in option.kinds)


@pytest.mark.parametrize("settings", ALL)
def test_every_field_is_an_option_with_a_help_text(settings: type) -> None:
    options = options_of(settings)
    nested = {"model", "scheduler", "speculative"} if settings in (TargetSettings, DraftSettings) else set()
    nested |= {"lookup_settings"} if settings is GatewaySettings else set()
    assert {field.name for field in fields(settings)} - nested == options.keys()
    assert all(option.help and not option.help.endswith(".") for option in options.values())


@pytest.mark.parametrize("settings", ALL)
def test_every_option_is_in_one_group(settings: type) -> None:
    grouped = list(chain.from_iterable(groups_of(settings).values()))
    assert sorted(grouped) == sorted(options_of(settings))
    assert all(groups_of(settings).values())


def test_groups_that_leave_an_option_out_are_refused() -> None:
    class Misspelt(LookupSettings):
        GROUPS: ClassVar = {"others": "prompt_lokup_max"}

    @dataclass
    class Late:
        GROUPS: ClassVar = {"one": "second"}
        first: int = option(1, "no flag would show it")
        second: int = option(2, "shown")

    with pytest.raises(ValueError, match="GROUPS of Misspelt names prompt_lokup_max"):
        groups_of(Misspelt)
    with pytest.raises(ValueError, match="first comes before the first of the GROUPS of Late"):
        groups_of(Late)


@pytest.mark.parametrize(
    ("settings", "name"),
    [(settings, name) for settings in CLASSES for name, each in options_of(settings).items() if each.flag],
)
def test_a_flag_carries_every_value(settings: type, name: str) -> None:
    given = {**REQUIRED.get(settings, {}), **PAIRED.get(name, {}), name: other_value(options_of(settings)[name])}
    made = settings(**given)
    parser = Parser(prog="service")
    add_flags(parser, settings)
    assert settings_from(settings, parser.parse_args(flags_of(made))) == made


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (ModelSettings, {"model": ""}, "model is empty; give the folder"),
        (ModelSettings, {"dtype": "int4"}, "dtype is 'int4'; choose one of auto, float32"),
        (ModelSettings, {"quantization": "int2"}, "quantization is 'int2'; choose one of int8, int4, auto, or none"),
        (ModelSettings, {"gpu_memory_utilization": 0.0}, "is 0.0; it must be above 0 and at most 1"),
        (ModelSettings, {"block_size": 0}, "block_size is 0; it must be above 0"),
        (ModelSettings, {"num_threads": "two"}, "num_threads is 'two'; it must be a whole number or nothing"),
        (ModelSettings, {"num_threads": True}, "num_threads is True; it must be a whole number or nothing"),
        (SchedulerSettings, {"max_wait_s": float("nan")}, "max_wait_s is nan; it must be above 0"),
        (ModelSettings, {"device": "cuda:1", "tensor_parallel_size": 2}, "choose GPUs with CUDA_VISIBLE_DEVICES"),
        (SpeculativeSettings, {"draft_tensor_parallel_size": 2}, "is 2: a draft runs in one process; use 1"),
        (SpeculativeSettings, {"num_speculative_tokens": 65}, "num_speculative_tokens is 65; it must be in [0, 64]"),
        (SpeculativeSettings, {"tree_depth": 0}, "tree_depth is 0; it must be in [1, 64]"),
        (ServerSettings, {"port": 70000}, "port is 70000; it must be in [0, 65535]"),
        (ServerSettings, {"socket": "/s"}, "socket is '/s'; write unix:/path"),
        (GatewaySettings, {"verification": "vote"}, "verification is 'vote'; choose one of token, block, coupled"),
        (GatewaySettings, {"drain_s": -1.0}, "drain_s is -1.0; it must be at least 0"),
    ],
)  # fmt: skip
def test_a_mistake_names_value_limit_and_field(settings: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        settings(**{**REQUIRED.get(settings, {}), **given})
    assert message in str(raised.value)
    assert raised.value.param == next(iter(given))


def test_a_rule_may_be_given_by_name() -> None:
    assert GatewaySettings(verification="token").verification is Rule.TOKEN


def test_underscores_are_hyphens() -> None:
    parser = Parser(prog="service")
    add_flags(parser, SchedulerSettings)
    assert parser.parse_args(["--max_num_seqs=3"]) == parser.parse_args(["--max-num-seqs", "3"])
    assert isinstance(parser.parse_args([]), argparse.Namespace)


def test_a_draft_is_not_split() -> None:
    model = ModelSettings(model="draft", tensor_parallel_size=2)
    with pytest.raises(InvalidRequest, match="tensor_parallel_size is 2: only a target is split") as raised:
        DraftSettings(speculative=SpeculativeSettings(), model=model)
    assert raised.value.param == "tensor_parallel_size"
