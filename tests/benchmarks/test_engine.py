"""Shares of the bandwidth by rows and context: the arithmetic, and a small run on a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import engine
from benchmarks.engine import EngineReport, Load, PassTime, loads, show
from specdec.errors import InvalidRequest
from tandem.checkpoints import DRAFT, find_checkpoint


def _report(*points: PassTime) -> EngineReport:
    return EngineReport(
        model="bundled",
        weights="float32",
        threads=2,
        weight_bytes=4000,
        execution="",
        bandwidth=2e9,
        points=points,
    )


def test_a_share_is_bytes_over_time_over_bandwidth() -> None:
    assert PassTime(1, 5, 128, ms=2.0, bytes_read=1_000_000).share(bandwidth=1e9) == pytest.approx(0.5)


def test_every_load_is_measured_once() -> None:
    found = loads((1, 5), (1, 8), (64, 256))
    assert len(found) == len(set(found)) == 6
    assert Load(8, 1, 256) in found
    assert Load(1, 5, 64) in found


def test_what_follows_from_the_points() -> None:
    report = _report(
        PassTime(1, 1, 1000, 2.0, 10), PassTime(1, 5, 1000, 2.2, 10), PassTime(1, 1, 3000, 3.0, 10),
        PassTime(1, 1, 4000, 3.4, 10),
        PassTime(32, 1, 1000, 8.0, 10),
    )  # fmt: skip
    assert report.ratio((1, 5, 1000), (1, 1, 1000)) == pytest.approx(1.1)
    assert report.ratio((1, 7, 1000), (1, 1, 1000)) is None
    text = [part for part in show(report) if isinstance(part, str)]
    assert "5 rows / 1 behind 1000 entries: 1.10" in text
    assert "32 sessions decode 8.0 times as many tokens a second as one" in text


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = ["--model", find_checkpoint(DRAFT), "--rows", "1,5", "--sessions", "1,2", "--contexts", "64,3000"]
    arguments += ["--formats", "float32,int8,int4", "--seconds", "0.1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["engine", *arguments])
    assert engine.main() == 0
    found, int8, int4 = json.loads(file.read_text())
    assert int4["weight_bytes"] < 0.95 * int8["weight_bytes"]  # most of this model is its output layer, of 8 bits
    assert int8["weight_bytes"] < 0.3 * found["weight_bytes"]
    assert found["bandwidth"] > 1e8
    assert found["weight_bytes"] == pytest.approx(4 * 900_000, rel=0.1)
    assert len(found["points"]) == 6
    for point in found["points"]:
        assert point["ms"] > 0
        entries = point["sessions"] * (point["context"] + point["rows"])
        assert point["bytes_read"] == found["weight_bytes"] + entries * 2 * 2 * 2 * 32 * 4
    assert "5 rows / 1 behind 64 entries" in capsys.readouterr().out


def test_a_model_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "vocab_size": 50, "num_hidden_layers": 1}
    config = AutoConfig.for_model("gemma", num_attention_heads=2, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--rows", "1", "--sessions", "1", "--contexts", "8"]
    monkeypatch.setattr("sys.argv", ["engine", *arguments])
    with pytest.raises(InvalidRequest, match="not by the native decoder"):
        engine.main()
