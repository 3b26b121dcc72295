"""``tandem bench`` with tiny numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.errors import Unavailable
from tandem import cli
from tandem.bench.huggingface import MODES, HuggingFace
from tandem.bench.measure import Measurement
from tandem.bench.probe import Costs
from tandem.checkpoints import MODELS

TINY = ["--num-prompts", "2", "--max-tokens", "16", "--prompt-tokens", "16"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem", "bench", *TINY, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.e2e
def test_a_small_run_over_grpc(tmp_path: Path) -> None:
    done = bench("--k", "3", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    for text in ("plain", "speculative, k = 3", "acceptance per token", "limit, overlapped", "round overhead", "torch"):
        assert text in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert {name: len(rates) for name, rates in result["tokens_per_s"].items()} == {"plain": 2, "speculative": 2}
    assert 0 <= result["alpha"] <= 1
    assert 1 <= result["acceptance_length"] <= 4
    assert min(result[name] for name in ("decode_ms", "verify_ms", "draft_ms", "c")) > 0
    assert result["serial_limit"] <= result["overlapped_limit"]


def test_two_embedded_sessions_at_a_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--services", "embedded", "--batch-size", "2", "--temperature", "1", "--verification", "token"]
    assert cli.main(["bench", *TINY, *arguments]) == 0
    printed = capsys.readouterr().out
    assert "2 sessions" in printed
    assert "temperature 1, rule token" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "python-12m"], "nothing to compare"),
        (["--model", "python-12m", "--k", "2"], "needs a drafter"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--pad-target", "much"], "200M"),
        (["--pad-target", "1M"], "it is larger"),
        (["--prompt-tokens", "1000000"], "ask for fewer"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


async def test_hugging_face_runs_every_mode() -> None:
    models = {"target": str(MODELS / "python-12m"), "draft": str(MODELS / "python-1m"), "dtype": "float32"}
    rival = await HuggingFace.start({**models, "threads": 1, "k": 2, "temperature": 0.0})
    try:
        for mode in MODES:
            assert await rival.run(mode, [[5, 6, 7, 8]], 8) > 0
        with pytest.raises(Unavailable, match="Hugging Face: "):
            await rival.run("HF generate", [[10**6]], 8)
    finally:
        await rival.close()


def test_summary_of_known_numbers() -> None:
    result = Measurement(k=4, rates={"plain": [10.0, 20.0], "speculative": [20.0, 40.0]})
    result.histogram = [2, 0, 0, 0, 2]
    result.round_ms = [12.0]
    result.costs = Costs(decode_ms=4.0, verify_ms=5.0, draft_ms=0.5, wire_ms=1.0)
    assert result.alpha == 0.8
    assert result.acceptance_length == 3.0
    assert result.ratio("speculative").median == 2.0
    assert (result.costs.c, result.costs.d, result.costs.verify_ratio) == (0.125, 0.25, 1.25)
    assert result.round_overhead_ms == 5.0
    serial, overlapped = result.limits()
    assert serial == pytest.approx((1 - 0.8**5) / 0.2 / 1.75)
    assert overlapped == pytest.approx((1 - 0.8**5) / 0.2)
    assert result.summary()["share_of_overlapped_limit"] == pytest.approx(2.0 / overlapped)
