"""vLLM's options: none is unknown, none is silent, and what cannot be honoured is refused by name."""

import pytest

from specdec.errors import InvalidRequest
from specdec.flags import Parser
from specdec.settings import GatewaySettings, ModelSettings, SchedulerSettings
from specdec.settings.option import options_of
from tandem.speculative_config import OLDER_NAMES
from tandem.vllm_options import VLLM_OPTIONS, add_vllm_flags, as_argument, as_flag, notes_on
from tests.tandem.cli.test_flags import parse

OWN = {name for settings in (ModelSettings, SchedulerSettings, GatewaySettings) for name in options_of(settings)}


def parsed(*argv: str) -> dict[str, object]:
    args = parse("python-12m", *argv)
    return {name: getattr(args, name) for name in VLLM_OPTIONS}


def lines(*argv: str) -> list[str]:
    return [line for _, line in notes_on(parsed(*argv), as_flag)]


def test_no_option_is_both_vllms_and_our_own() -> None:
    assert len(VLLM_OPTIONS) > 300
    assert not VLLM_OPTIONS.keys() & (OWN | OLDER_NAMES.keys())


def test_the_flags_of_a_usual_vllm_command_line_each_get_a_line() -> None:
    assert lines(
        *("--tool-call-parser", "hermes", "--enable-auto-tool-choice", "--reasoning-parser", "qwen3"),
        *("--load-format", "auto", "--prefix-match-unit", "16", "--disable-log-requests", "--pipeline_parallel_size=1"),
    ) == [
        "--enable-auto-tool-choice, --tool-call-parser hermes, --reasoning-parser qwen3: no effect here: how calls of"
        " tools and thoughts are read follows from the chat template, or from --response-template",
        "--prefix-match-unit 16: no effect here: prompts are compared token by token, block by block",
        "--disable-log-requests: no effect here: --log-level, --log-format and --log-requests choose what is logged,"
        " and texts never are",
        "--load-format auto, --pipeline-parallel-size 1: that is so here anyway",
    ]
    assert lines() == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype fp8 is not supported (only auto); the KV cache has the type"),
        (("--enable-lora",), "--enable-lora is not supported; only the base model is served"),
        (("--lora-modules", "a=b", "c=d"), "--lora-modules a=b c=d is not supported; only the base model"),
        (("-dp", "4"), "--data-parallel-size 4 is not supported (only 1); start a target for each replica"),
        (("--revision", "v1"), "--revision v1 is not supported (only main); download that revision"),
        (("--generation-config", "auto"), "(only vllm); sampling parameters are those of the request"),
        (("--config", "serve.yaml"), "--config serve.yaml is not supported; give the flags themselves"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_a_remedy(argv: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lines(*argv)
    assert text in str(caught.value)


def test_each_option_is_parsed_and_is_never_silent() -> None:
    parser = Parser()
    add_vllm_flags(parser)
    for option in VLLM_OPTIONS.values():
        flag = "--" + option.name.replace("_", "-")
        argv = [flag] if option.is_switch else [flag, "something"]
        given = vars(parser.parse_args(argv))
        if option.is_ignored:
            ((is_ignored, line),) = notes_on(given, as_flag)
            assert is_ignored
            assert line.startswith(f"{' '.join(argv)}: no effect here: ")
        else:
            with pytest.raises(InvalidRequest) as caught:
                notes_on(given, as_flag)
            assert str(caught.value).startswith(f"{' '.join(argv)} is not supported")
            assert caught.value.param == option.name
        for same in option.same:
            assert list(notes_on({option.name: same}, as_flag)) == [(False, f"{flag} {same}: that is so here anyway")]
        assert not list(notes_on({option.name: None}, as_argument))
