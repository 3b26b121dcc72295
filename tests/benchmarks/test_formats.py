"""Passes in every format of the weights: a small run on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import formats
from benchmarks.formats import FORMATS, FormatTimes
from tandem.checkpoints import DRAFT, find_checkpoint


def test_a_share_is_the_weights_bytes_over_the_time_to_decode() -> None:
    times = FormatTimes("int8", 1_000_000, decode=2.0, verify_5=2.2, verify_8=2.4, step_8=3.0, step_32=6.0)
    assert times.share(bandwidth=1e9) == pytest.approx(0.5)


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = ["--model", find_checkpoint(DRAFT), "--seconds", "0.1", "--threads", "1", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["formats", *arguments])
    assert formats.main() == 0
    found = json.loads(file.read_text())
    assert found["bandwidth"] > 1e8
    sizes = {one["name"]: one["weight_bytes"] for one in found["formats"]}
    assert list(sizes) == [name for name, *_ in FORMATS]
    assert sizes["float32"] == pytest.approx(2 * sizes["bfloat16"], rel=0.05)
    assert sizes["int4"] < 0.95 * sizes["int8"]  # most of this model is its output layer, of 8 bits
    assert all(one[load] > 0 for one in found["formats"] for load in ("decode", "verify_5", "verify_8", "step_32"))
    assert "verify(5)" in capsys.readouterr().out
