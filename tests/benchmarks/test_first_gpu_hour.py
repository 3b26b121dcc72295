"""The arithmetic, the comparison with the CPU, and every step of the first hour on a CPU."""

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import tandem
from benchmarks import first_gpu_hour, random_pairs
from benchmarks.passes import Step, bytes_read, measure_bandwidth, prefill_flops, time_steps
from benchmarks.random_pairs import SHAPES, write_pair
from engine.engine import Engine
from engine.loading.load import load_engine
from specdec.errors import InvalidRequest
from specdec.settings import ModelSettings
from tests.engine.cuda import agreement
from tests.engine.cuda.agreement import Check, check_device, decide, distance

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pair")
    return write_pair(SHAPES["tiny"], folder, dtype=torch.float32, device=CPU, max_model_len=600)[0]


def test_a_decode_pass_reads_the_weights_once_and_every_entry() -> None:
    shape = SHAPES["7B"]
    assert bytes_read(shape, 2, sessions=1, context=0) == 2 * (shape.num_parameters - 32000 * 4096)
    entries = bytes_read(shape, 2, sessions=8, context=1000) - bytes_read(shape, 2, sessions=1, context=0)
    assert entries == 8 * 1000 * 2 * 32 * 32 * 128 * 2, "8 sessions, entries, key and value, layers, heads, size, bytes"


def test_shares_and_prices() -> None:
    step = Step(sessions=1, context=0, decode_s=0.005, verify_s=0.006, num_bytes=10**10)
    assert step.bandwidth == pytest.approx(2e12)
    assert step.verify_ratio == pytest.approx(1.2)
    shape = SHAPES["1B"]
    output = 32000 * 2048
    assert prefill_flops(shape, 10) == 20 * (shape.num_read - output) + 2 * output
    assert measure_bandwidth(CPU, 2**22, 3) > 1e8


def test_steps_that_do_not_fit_are_left_out(target: str) -> None:
    engine = load_engine(ModelSettings(model=target, device="cpu", num_threads=1, kv_cache_memory_bytes=400_000))
    loads = [(1, 40), (2, 40), (1, 4000), (1000, 40)]
    steps = list(time_steps(engine, SHAPES["tiny"], k=4, loads=loads, repeats=2))
    assert [(step.sessions, step.context) for step in steps] == [(1, 40), (2, 40)]
    assert all(step.decode_s > 0 for step in steps)
    assert engine.pool.used_blocks == 0


def test_a_device_that_answers_otherwise_is_noticed(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = list(check_device(target, "cpu"))
    assert [check.passed for check in checks] == [True] * 4
    forward = Engine.forward

    def wrong(engine: Engine, segments: object) -> torch.Tensor:
        logits: torch.Tensor = forward(engine, segments).clone()  # type: ignore[arg-type]
        if engine.runner.name == "native decoder" and len(logits) > 300:  # the check at load has smaller passes
            logits[-1] = logits[-1].roll(1)
        return logits

    monkeypatch.setattr(Engine, "forward", wrong)
    assert [check.passed for check in check_device(target, "cpu")] == [True, False, False, True]


def test_a_gpu_must_not_fall_back(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(folder: str, device: str, dtype: str, *, enforce_eager: bool) -> tuple[torch.Tensor, str]:
        return torch.eye(4), "triton attention"

    monkeypatch.setattr(agreement, "_logits", logits)
    monkeypatch.setattr(agreement, "decide", lambda logits, device: [1])
    failed = [check.name for check in check_device(target, "cuda:0") if not check.passed]
    assert failed == ["cuda graphs used in float32", "cuda graphs used in bfloat16"]


def test_what_is_not_a_number_does_not_pass() -> None:
    expected = torch.randn(3, 9)
    assert distance(expected, expected) == 0.0
    assert not Check("", distance(expected * float("nan"), expected), 1.0).passed


def test_decisions_depend_on_the_logits() -> None:
    logits = torch.randn(10, 100, generator=torch.Generator().manual_seed(0))
    decided = decide(logits, CPU)
    assert decided == decide(logits, CPU)
    assert len(decided) == 72
    assert sum(one != other for one, other in zip(decided, decide(logits.flip(1), CPU), strict=True)) > 60


# --- the command ---

TINY = (
    "--device cpu --sizes tiny --dtype float32 --sessions 1 --contexts 16 --repeats 2 --max-tokens 8 --chaos-seconds 1"
    " --tests tests/engine/cuda/test_sync.py"
)
NAMES = [
    *("environment", "tests-engine-cuda-test_sync", "identity", "passes-tiny", "serve-tiny-1", "vllm-tiny", "chaos"),
]


def arguments(folder: Path, *more: str) -> list[str]:
    return ["first_gpu_hour", str(folder), *TINY.split(), *more]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["first_gpu_hour", str(tmp_path), "--only", "environment"])
    assert first_gpu_hour.main() == 1
    found = json.loads((tmp_path / "environment.json").read_text())
    assert (found["state"], found["data"]) == ("FAILED", {})
    assert "there is no CUDA device here" in found["verdict"]


def test_steps_are_taken_up_where_they_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results stay, what failed is run again, and the report is written after every step."""
    run, ended = [], {"passes-tiny": "below its bar", "chaos": "FAILED"}

    def run_apart(name: str, folder: Path, argv: object, limit_s: float) -> object:
        assert limit_s == first_gpu_hour.STEP_S
        run.append(name)
        return first_gpu_hour.write_result(folder, name, "| done", state=ended.get(name, "passed"), seconds=1, data={})

    monkeypatch.setattr(first_gpu_hour, "run_apart", run_apart)
    monkeypatch.setattr("sys.argv", arguments(tmp_path))
    assert first_gpu_hour.main() == 1
    assert run == NAMES
    assert first_gpu_hour.main() == 1
    assert run == [*NAMES, "chaos"]
    ended.clear()
    assert first_gpu_hour.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed  chaos: | done"
    assert "| passes-tiny | below its bar | 1 | / done |" in (tmp_path / "report.md").read_text()


def test_a_call_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step gets what is left, and a minute at least."""
    limits, now = [], [0.0]

    def run_apart(name: str, folder: Path, argv: object, limit_s: float) -> object:
        limits.append(limit_s)
        now[0] += 250
        return first_gpu_hour.write_result(folder, name, "", state="passed", seconds=1, data={})

    monkeypatch.setattr(first_gpu_hour, "run_apart", run_apart)
    monkeypatch.setattr(first_gpu_hour.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.argv", arguments(tmp_path, "--seconds", "800"))
    assert first_gpu_hour.main() == 1
    assert limits == [540, 540, 300]
    assert first_gpu_hour.main() == 1
    assert limits == [540, 540, 300] * 2
    assert first_gpu_hour.main() == 0
    assert len(limits) == len(NAMES)


def test_a_step_that_hangs_is_killed_with_all_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here ``python`` starts another process and waits."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    found = first_gpu_hour.run_apart("identity", tmp_path, (), 0.5)
    assert (found["state"], found["verdict"]) == ("FAILED", "it took more than 0.5 s; see identity.log")
    child = int((tmp_path / "pid").read_text())
    with suppress(psutil.NoSuchProcess):
        psutil.Process(child).wait(10)


def test_a_step_that_ends_without_a_verdict_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here ``python`` says why and ends."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho $@\nexit 2\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    found = first_gpu_hour.run_apart("no such step", tmp_path, [str(tmp_path), *TINY.split()], 60)
    assert (found["state"], found["verdict"]) == ("FAILED", "it ended with status 2; see no such step.log")
    said = (tmp_path / "no such step.log").read_text()
    assert said == f"-m benchmarks.first_gpu_hour {tmp_path} {TINY} --only no such step\n"


def test_a_step_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", arguments(tmp_path, "--only", "no such step"))
    with pytest.raises(InvalidRequest, match="no such step is no step; the steps are environment, "):
        first_gpu_hour.main()


@pytest.mark.e2e
@pytest.mark.parametrize(
    "names", [("environment", "identity", "passes-tiny"), pytest.param(NAMES, marks=pytest.mark.exhaustive)]
)
def test_every_step_runs_here(names: Sequence[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    is_whole = names is NAMES
    if not is_whole:  # the kernels, the comparison with the CPU and the drafters have tests of their own
        monkeypatch.setattr(first_gpu_hour, "_KERNEL_TESTS", ("tests/test_pairwise.py",))
        monkeypatch.setattr(first_gpu_hour, "_DRAFTERS", {"trees": {"method": "eagle3", "tree_top_k": 3}})
        monkeypatch.setattr(agreement, "check_device", lambda folder, device: [Check(f"logits of {device}", 0.0, 0.1)])
    for name in names:
        monkeypatch.setattr("sys.argv", arguments(tmp_path, "--only", name))
        assert first_gpu_hour.main() == 0, (tmp_path / f"{name}.json").read_text()
    found = json.loads((tmp_path / "passes-tiny.json").read_text())["data"]
    assert [(step["sessions"], step["context"], step["k"]) for step in found["steps"][:2]] == [(1, 16, 4)] * 2
    assert found["steps"][0]["share"] > 0
    assert found["calls_eager"]["operations"] > found["calls"]["operations"] > 0
    assert found["draft_s"].keys() == found["verdict_s"].keys() == {"greedy", "token", "block", "coupled"}
    page = first_gpu_hour.report(tmp_path, names)
    assert "## passes-tiny" in page
    assert ("tokens/s: plain" in page) is ("serve-tiny-1" in names)
    identity = json.loads((tmp_path / "identity.json").read_text())
    assert identity["verdict"] == f"{8 if is_whole else 2} checks and all texts agree"


def test_texts_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agreement, "check_device", lambda folder, device: [Check(f"logits of {device}", 1.0, 0.1)])
    monkeypatch.setattr(random_pairs, "write_pair", lambda *_, **__: ("target", "draft"))

    class Wrong:
        """Trees change a text, and nothing that a head drafts in a chain is accepted."""

        def __init__(self, model: str, *, speculative_config: Any, **_: Any) -> None:
            config = speculative_config or {}
            self.token = 1 + ("tree_top_k" in config)
            self.accepted = int(config != {"method": "eagle3"})

        def __enter__(self) -> "Wrong":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def generate(self, prompts: list[str], _: object) -> list[Any]:
            metrics = Namespace(num_accepted_tokens=self.accepted)
            return [Namespace(outputs=[Namespace(token_ids=(self.token,))], metrics=metrics) for _ in prompts]

    monkeypatch.setattr(tandem, "LLM", Wrong)
    monkeypatch.setattr("sys.argv", arguments(tmp_path, "--only", "identity"))
    assert first_gpu_hour.main() == 1
    verdict = json.loads((tmp_path / "identity.json").read_text())["verdict"]
    assert verdict == "differs: logits of cpu, logits of cpu, trees, tokens accepted of head, head's trees"
