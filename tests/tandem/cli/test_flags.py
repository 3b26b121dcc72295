"""Flags: every alias reaches its setting, every mistake is one clear line."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from specdec.flags import Parser, flags_of
from specdec.rules import Rule
from tandem.checkpoints import MODELS
from tandem.cli import main as cli
from tandem.cli import serve
from tandem.cli.main import COMMANDS
from tandem.cli.services import SERVICES
from tandem.launcher.deployment import Deployment, deployment_of, services_of

TARGET, DRAFT = str(MODELS / "python-12m"), str(MODELS / "python-1m")
PAIR = json.dumps({"model": "python-1m", "num_speculative_tokens": 5})
SOCKETS = Path("/sockets")
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="tandem serve")
    serve.add_arguments(parser)
    args = parser.parse_args(argv)
    serve.take_model(args)
    return args


def deploy(*argv: str) -> Deployment:
    return deployment_of(parse(*argv))


def test_nothing_given_serves_the_bundled_pair() -> None:
    deployment = deploy()
    assert deployment.target.model.model == TARGET
    assert deployment.draft is not None
    assert deployment.draft.speculative.model == DRAFT
    assert deployment.draft.speculative.num_speculative_tokens == deployment.gateway.num_speculative_tokens == 4
    assert deployment.gateway.served_model_name == ("python-12m",)
    assert deployment.gateway.tokenizer == TARGET
    assert deployment.describe() == "python-12m, drafted by python-1m, k = 4"


@pytest.mark.parametrize("model", [TARGET, TARGET + "/", "."])
def test_the_served_name_is_the_folders(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TARGET)
    assert deploy(model).gateway.served_model_name == ("python-12m",)


@pytest.mark.parametrize("command", [*COMMANDS, *SERVICES])
def test_help_is_short_of_usage_and_long_lists_have_titles(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    usage, _, described = capsys.readouterr().out.partition("\n\n")
    assert len(usage.splitlines()) <= 4
    untitled = described.partition("\noptions:")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  (--[\w-]+)", untitled, re.MULTILINE)) < 8


@pytest.mark.parametrize(
    ("given", "meant"), [("--prot=80", "--port"), ("--tensor_parallel_siz", "--tensor-parallel-size")]
)
@pytest.mark.parametrize("command", ["serve", "gateway", "target"])
def test_a_misspelt_flag_names_the_nearest(
    command: str, given: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (command, meant) == ("gateway", "--tensor-parallel-size"):
        meant = ""
    with pytest.raises(SystemExit):
        cli.main([command, given, *(["--model", TARGET] if command == "target" else [])])
    assert (f"; did you mean {meant!r}? (see" in capsys.readouterr().err) == bool(meant)


@pytest.mark.parametrize("command", ["serve", "chat", "bench", "gateway"])
def test_a_wrong_flag_points_to_the_help_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--bad-flag"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "unrecognized arguments: --bad-flag" in line
    assert line.endswith(f"(see tandem {command} --help)")


def test_a_model_alone_runs_plain() -> None:
    deployment = deploy("python-12m")
    assert deployment.draft is None
    assert deployment.gateway.num_speculative_tokens == 0
    assert deployment.describe() == "python-12m (no speculation)"


@pytest.mark.parametrize(
    "argv",
    [
        ("python-12m", "--speculative-config", PAIR),
        ("python-12m", "--speculative_config", PAIR),
        ("python-12m", f"--speculative_config={PAIR}"),
        ("python-12m", "-sc", PAIR),
        ("python-12m", "--speculative-config.model", "python-1m", "--speculative_config.num_speculative_tokens=5"),
        ("-sc.num_speculative_tokens", "5", "python-12m", "--speculative-config.model", "python-1m"),
        ("--model", "python-12m", "--speculative-model", "python-1m", "--num-speculative-tokens", "5"),
        ("--model", "python-12m", "--speculative_model", "python-1m", "--num_speculative_tokens", "5",
         "--use-v2-block-manager", "--speculative-draft-tensor-parallel-size", "1"),
        ("python-12m", "--speculative-config", PAIR, "--num-speculative-tokens", "5"),
    ],
)  # fmt: skip
def test_spellings_of_a_draft_model(argv: tuple[str, ...]) -> None:
    deployment = deploy(*argv)
    assert deployment.draft is not None
    assert deployment.draft.model is not None
    assert deployment.draft.model.model == DRAFT
    assert deployment.draft.speculative.num_speculative_tokens == deployment.gateway.num_speculative_tokens == 5


@pytest.mark.parametrize(
    "argv",
    [
        ("--speculative-config", NGRAM),
        ("--speculative-model", "[ngram]", "--num-speculative-tokens", "5", "--ngram-prompt-lookup-max", "4"),
        ("--speculative_model=[ngram]", "--num_speculative_tokens=5", "--ngram_prompt_lookup_max=4",
         "--ngram_prompt_lookup_min=1"),
        ("--speculative-model", "ngram", "--num-speculative-tokens", "5"),
        ("--speculative-config", '{"model": "ngram", "num_speculative_tokens": 5}'),
    ],
)  # fmt: skip
def test_spellings_of_ngram(argv: tuple[str, ...]) -> None:
    deployment = deploy("python-12m", *argv)
    assert deployment.draft is None
    gateway = deployment.gateway
    assert (gateway.lookup, gateway.num_speculative_tokens) == (("ngram",), 5)
    assert (gateway.lookup_settings.prompt_lookup_min, gateway.lookup_settings.prompt_lookup_max) == (1, 4)


def test_vllms_call_for_suffix_decoding() -> None:
    deployment = deploy("python-12m", "-sc", '{"method": "suffix", "num_speculative_tokens": 32}')
    assert deployment.draft is None
    assert (deployment.gateway.lookup, deployment.gateway.num_speculative_tokens) == (("suffix",), 32)
    lookup = deployment.gateway.lookup_settings
    assert lookup.suffix_decoding_max_tree_depth == 24
    assert lookup.suffix_decoding_max_cached_requests == 10000
    assert lookup.suffix_decoding_max_spec_factor == 1.0
    assert lookup.suffix_decoding_min_token_prob == 0.1
    deployment = deploy("python-12m", "-sc", '{"method": "suffix"}')
    assert deployment.gateway.num_speculative_tokens == 24
    arguments = json.dumps({"method": ["suffix"], "suffix_decoding_max_tree_depth": 12})
    target, gateway = services_of(deploy("python-12m", "-sc", arguments), SOCKETS)
    assert "suffix" not in " ".join(target.arguments)
    given = " ".join(gateway.arguments)
    assert "--lookup suffix" in given
    assert "--num-speculative-tokens 12" in given
    assert "--suffix-decoding-max-tree-depth 12" in given


def test_of_two_methods_the_lookup_reaches_the_gateway() -> None:
    deployment = deploy("-sc", '{"method": ["suffix", "draft_model"], "num_speculative_tokens": 5}')
    assert deployment.draft is not None
    assert deployment.draft.speculative.method == "draft_model"
    assert deployment.gateway.lookup == ("suffix",)
    assert deployment.draft.model is not None  # the bundled draft of the bundled target
    assert deployment.describe() == "python-12m, drafted by suffix and python-1m, k = 5"
    _, draft, gateway = (" ".join(service.arguments) for service in services_of(deployment, SOCKETS))
    assert "--method draft_model" in draft
    assert "suffix" not in draft
    assert "--lookup suffix" in gateway


def test_services_that_run_already_are_not_started_again() -> None:
    (gateway,) = services_of(deploy(), SOCKETS, target="unix:/target.sock", draft="unix:/draft.sock")
    arguments = " ".join(gateway.arguments)
    assert "--targets unix:/target.sock" in arguments
    assert "--drafts unix:/draft.sock" in arguments


def test_a_head_is_told_where_the_target_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    safetensors.numpy.save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    deployment = deploy("python-12m", "-sc", json.dumps({"model": str(tmp_path)}))
    assert deployment.draft is not None
    assert deployment.draft.speculative.method == "eagle3"
    assert deployment.draft.target_model == TARGET
    assert f"--target-model {TARGET}" in " ".join(services_of(deployment, SOCKETS)[1].arguments)


def test_a_draft_model_that_reads_states_is_told_too(tmp_path: Path) -> None:
    shutil.copytree(DRAFT, tmp_path, dirs_exist_ok=True)
    for target in (None, TARGET):
        deployment = deploy("python-12m", "-sc", json.dumps({"model": str(tmp_path)}))
        assert deployment.draft is not None
        assert deployment.draft.speculative.method == "draft_model"
        assert deployment.draft.target_model == target
        (tmp_path / "warp_model.bin").touch()


def test_the_other_flags_reach_their_settings() -> None:
    deployment = deploy(
        *("python-12m", "--host", "0.0.0.0", "--insecure", "--port", "81", "--grpc-port", "82"),
        *("--served-model-name", "a", "b"),
        *("--dtype", "bfloat16", "--seed", "42", "--max-model-len", "512", "--gpu_memory_utilization", "0.8"),
        *("--kv-cache-memory-bytes", "1000000", "-tp", "1", "--trust-remote-code", "--verification", "token"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--chat-template", "x", "--enforce-eager"),
        *("--drain-s", "3", "--num-threads", "1", "--no-enable-prefix-caching"),
        *("--speculative-config", '{"model": "python-1m", "disable_by_batch_size": 6}'),
    )
    gateway, model, scheduler = deployment.gateway, deployment.target.model, deployment.target.scheduler
    assert (gateway.host, gateway.port, gateway.grpc_port, gateway.seed) == ("0.0.0.0", 81, 82, 42)
    assert (gateway.served_model_name, gateway.chat_template, gateway.drain_s) == (("a", "b"), "x", 3.0)
    assert (gateway.disable_by_batch_size, gateway.verification) == (6, Rule.TOKEN)
    assert (model.dtype, model.max_model_len, model.kv_cache_memory_bytes) == ("bfloat16", 512, 10**6)
    assert deploy("--dtype", "half").target.model.dtype == "float16"
    assert (model.trust_remote_code, model.enforce_eager, model.num_threads) == (True, True, 1)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (8, 64)
    assert (scheduler.enable_prefix_caching, deploy().target.scheduler.enable_prefix_caching) == (False, True)
    told = ["--no-enable-prefix-caching" in service.arguments for service in services_of(deployment, SOCKETS)]
    assert told == [True, True, False]
    assert deployment.target.verification is Rule.TOKEN
    assert deployment.draft is not None
    assert deployment.draft.model is not None
    assert (deployment.draft.model.dtype, deployment.draft.model.max_model_len) == ("bfloat16", 512)
    assert deployment.draft.model.kv_cache_memory_bytes is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("-sc", PAIR, "--speculative-draft-tensor-parallel-size", "2"), "runs in one process"),
        (("no-such-model",), "bundled model"),
        (("python-12m", "--model", "python-1m"), "two models"),
        (("python-12m", "--speculative-config", "{"), "not JSON"),
        (("python-12m", "--speculative-config", "[]"), "must be an object"),
        (("python-12m", "--speculative-config", '{"modle": "x"}'), "modle"),
        (("python-12m", "--speculative-config", '{"method": "telepathy"}'), "telepathy"),
        (("python-12m", "--speculative-config", PAIR, "--num-speculative-tokens", "3"), "given twice"),
        (("python-12m", "--num-speculative-tokens", "3"), "num_speculative_tokens given without a drafter"),
        (("python-12m", "--gpu-memory-utilization", "2"), "gpu_memory_utilization"),
        (("python-12m", "-sc", '{"method": "ngram", "num_speculative_tokens": "5"}'), "must be a whole number"),
        (("python-12m", "-sc", '{"num_speculative_tokens": "5"}'), "without a drafter"),
        (("-sc", '{"model": null, "num_speculative_tokens": 3}'), "error: num_speculative_tokens given without"),
        (("-sc", '{"method": null, "tree_top_k": 2, "quantization": null}'), "error: tree_top_k given without"),
        (("-sc", '{"metod": null}'), "no option 'metod'; did you mean 'method'"),
        (("-sc", '{"metod": null, "num_speculative_tokens": 3}'), "no option 'metod'; did you mean 'method'"),
        (
            ("-sc", '{"prompt_lookup_max": 4, "num_speculative_tokens": 3}'),
            "prompt_lookup_max, num_speculative_tokens given",
        ),
        (("-sc", '{"metod": "ngram"}'), "no option 'metod'; did you mean 'method'"),
        (("-sc", "ngram"), "speculative_config is 'ngram', which is not JSON"),
        (("python-12m", "-sc", '{"method": "ngram", "prompt_lookup_max": true}'), "prompt_lookup_max is True"),
        (("python-12m", "-sc", '{"model": 5}'), "model is 5; it must be text or nothing"),
        (("python-12m", "-sc", '{"method": 5}'), "method is 5; choose one of"),
        (("python-12m", "-sc", '{"method": "mtp"}'), 'python-12m has no prediction layers, which method "mtp"'),
        (("python-12m", "-sc", '{"method": ["draft_model", "suffix"]}'), "the first must be one of ngram, suffix"),
        (("python-12m", "-sc", '{"method": ["suffix", "ngram", "draft_model"]}'), "there can be no third"),
        (("python-12m", "-sc", '{"method": ["suffix", "suffix"]}'), "the second another one"),
        (("python-1m", "-sc", '{"method": ["suffix", "draft_model"]}'), 'method "draft_model" needs "model"'),
        (("python-1m", "-sc", '{"method": "eagle3"}'), "none comes with it, and tandem train eagle3 makes one"),
        (("python-1m", "-sc", '{"method": ["suffix", "mlp_speculator"]}'), "tandem train mlp makes one"),
        (("python-12m", "-sc", '{"method": "suffix", "suffix_decoding_max_tree_depth": 0}'), "must be in [1, 512]"),
        (("python-12m", "-sc", '{"method": "suffix", "suffix_decoding_max_cached_requests": -1}'), "at least 0"),
        (("python-12m", "-sc", '{"method": "suffix", "suffix_decoding_max_spec_factor": -1}'), "at least 0"),
        (("python-12m", "-sc", '{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}'), "must be in [0, 1]"),
        (("python-12m", "-sc", '{"model": "python-1m", "num_speculative_tokens": NaN}'), "is nan; it must be a whole"),
        (("python-12m", "--served-model-name", ""), "served_model_name is ''; leave it out"),
        (("python-12m", "--port", "99999"), "port is 99999; it must be in [0, 65535]"),
        (("python-12m", "--request-timeout-s", "0"), "must be above 0"),
        (("python-12m", "--max-concurrent-sequences", "0"), "must be at least 1"),
    ],
)
def test_mistakes_are_named(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--max-model-len", "2kk"), "'2kk' is no whole number such as 4096, 4k (4000) or 4K (4096)"),
        (("--max-model-len", "0.5"), "'0.5' is no whole number"),
        (("--max-model-len", "1.0001k"), "'1.0001k' is no whole number"),
        (("-sc.model",), "argument -sc.model: expected one argument"),
        (("-sc.method", "ngram", "-sc", "{}"), "--speculative-config: given whole and by keys; give one of them"),
        (("-sc.method", "ngram", "-sc.method", "suffix"), "-sc.method: the key is given twice"),
        (("--compilation-config.a", "1", "--compilation-config.a.b", "2"), "-config.a.b: the key is given twice"),
        (("--port.x", "1"), "unrecognized arguments: --port.x 1"),
    ],
)
def test_wrong_numbers_and_keys_are_named(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "python-12m", *argv])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_vllms_whole_numbers_and_nested_keys() -> None:
    args = parse("python-12m", "--max-model-len", "1K", "--kv-cache-memory-bytes", "1.5g", "--max-num-seqs", "7",
                 "--compilation-config.pass_config.fuse", "true", "--compilation-config.mode=x")  # fmt: skip
    assert (args.max_model_len, args.kv_cache_memory_bytes, args.max_num_seqs) == (1024, 1_500_000_000, 7)
    assert json.loads(args.compilation_config) == {"pass_config": {"fuse": True}, "mode": "x"}


@pytest.mark.parametrize("argv", [("--prot", "1"), ("--dtype", "int3"), ("--port", "x")])
def test_unknown_flags_leave_with_2(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", *argv])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_services_get_what_differs_from_the_defaults() -> None:
    deployment = deploy("--dtype", "float32", "--drain-s", "3")
    services = {service.name: service for service in services_of(deployment, SOCKETS)}
    assert list(services) == ["target", "draft", "gateway"]
    target, draft, gateway = (" ".join(services[name].arguments) for name in services)
    assert f"--model {TARGET}" in target
    assert "--dtype float32" in target
    assert "--dtype float32" in draft
    assert f"--model {DRAFT}" in draft
    assert "--num-threads 1" in draft
    assert "--quantization auto" in draft
    assert "--quantization" not in target
    for name, arguments in (("target", target), ("draft", draft)):
        assert services[name].address == f"unix:/sockets/{name}.sock"
        assert f"--socket unix:/sockets/{name}.sock" in arguments
        assert "--port" not in arguments
        assert f"--{name}s unix:/sockets/{name}.sock" in gateway
    assert all("--drain-s 3" in arguments for arguments in (target, draft))


def test_a_server_that_keeps_no_past_outputs() -> None:
    """Requests may name suffix, also where a draft model is the server's method."""
    config = json.dumps({"model": DRAFT, "suffix_decoding_max_cached_requests": 0})
    gateway = services_of(deploy("--speculative-config", config), SOCKETS)[-1]
    at = gateway.arguments.index("--suffix-decoding-max-cached-requests")
    assert gateway.arguments[at + 1] == "0"


def test_the_ready_line_says_how_to_connect() -> None:
    assert deploy().ready_line({}).startswith("ready: http://127.0.0.1:8000/v1, gRPC 127.0.0.1:50051 | ")
    with_tls = deploy("--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem")
    assert with_tls.ready_line({}).startswith("ready: https://127.0.0.1:8000/v1, ")


def test_the_draft_is_rounded_unless_its_config_says_no() -> None:
    exact = deploy("--quantization", "int8", "--speculative-config", json.dumps({"model": DRAFT, "quantization": None}))
    assert exact.target.model.quantization == "int8"
    assert exact.draft is not None
    assert exact.draft.model is not None
    assert exact.draft.model.quantization is None


@pytest.mark.parametrize(
    "config", [{"model": None}, {"quantization": None}, {"method": None, "num_speculative_tokens": 0}]
)
def test_null_gives_nothing(config: dict[str, object]) -> None:
    deployment = deploy("python-12m", "-sc", json.dumps(config))
    assert deployment.draft is None
    assert deployment.gateway.lookup == ()


def test_flags_of_leaves_defaults_out() -> None:
    assert flags_of(deploy().target.scheduler) == ()


def test_help_and_version_load_nothing_heavy() -> None:
    for argument, expected in (("--help", "serve"), ("--version", "tandem 0")):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "tandem", argument], capture_output=True, text=True, check=True
        )
        assert expected in done.stdout
        assert not {" torch", " grpc", " transformers"} & {
            line.rpartition("|")[2].rstrip().lstrip() and " " + line.rpartition("|")[2].strip()
            for line in done.stderr.splitlines()
        }


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands" in capsys.readouterr().err


def test_all_services_send_their_traces_to_one_collector():
    services = services_of(deploy("--otlp-traces-endpoint", "http://collector:4317"), SOCKETS)
    assert [service.name for service in services] == ["target", "draft", "gateway"]
    for service in services:
        at = service.arguments.index("--otlp-traces-endpoint")
        assert service.arguments[at + 1] == "http://collector:4317"
