"""The overlap benchmark: curves from records, tables, a picture, and one tiny run of the whole."""

import json
from pathlib import Path

import pytest

from benchmarks import overlap
from benchmarks.overlap import Record, policies, sweep
from benchmarks.rounds import GuessOutcome, Statistics
from benchmarks.timeline import SimulatedCosts


def record(k: int, *outcomes: GuessOutcome) -> Record:
    return Record(rule="block", k=k, texts=[outcomes], statistics=Statistics.of([outcomes], k))


def test_every_place_takes_the_drafts_that_suit_it() -> None:
    few, many = record(1, *[GuessOutcome(1, 0)] * 6), record(4, *[GuessOutcome(4, 0)] * 6)
    prices = [SimulatedCosts(c=0.01, d=0.1), SimulatedCosts(c=2.0, d=0.1)]
    cheap, costly = sweep([few, many], policies(3, 3, 4)[:1], prices)
    assert (cheap.k, costly.k) == (4, 1)
    assert cheap.speed == pytest.approx(5 / (1 + 4 * 0.01 + 0.1))
    assert costly.speed == pytest.approx(2 / (1 + 2.0 + 0.1))
    assert (cheap.policy, cheap.d, cheap.hit_rate) == ("serial", 0.1, 0.0)


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--k", "2", "--d", "0,1", "--c", "0.05", "--num-prompts", "4", "--max-tokens", "24"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    monkeypatch.setattr("sys.argv", ["overlap", *arguments, *files])
    assert overlap.main() == 0
    content = json.loads((tmp_path / "out.json").read_text())
    assert [(each["rule"], each["k"]) for each in content["recorded"]] == [("block", 2), ("coupled", 2)]
    assert all(each["num_rounds"] > 4 * 24 / 3 - 1 for each in content["recorded"])
    assert len(content["samples"]) == 2 * 5 * 2
    speeds = {(each["rule"], each["policy"], each["d"]): each["speed"] for each in content["samples"]}
    for rule in ("block", "coupled"):
        assert speeds[rule, "serial", 0.0] > speeds[rule, "serial", 1.0]
        assert speeds[rule, "enumerated, forwarded", 1.0] > speeds[rule, "serial", 1.0]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "next token guessed" in capsys.readouterr().out
