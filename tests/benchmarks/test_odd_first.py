"""The benchmark of odd first requests: its exit status, and one short run in one process."""

import argparse
import re

import pytest

from benchmarks import odd_first
from tandem.bench.limits import Ratio


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (0.9, 1)])
def test_the_exit_status_tells_whether_what_followed_was_slower(
    ratio: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(*_: object) -> Ratio:
        return Ratio.of([ratio] * 4, [1.0] * 4)

    monkeypatch.setattr(odd_first, "measure", measure)
    monkeypatch.setattr("sys.argv", ["odd_first"])
    assert odd_first.main() == status
    assert capsys.readouterr().out.count(f"{ratio:.3f}") == 2


async def test_the_odd_request_is_drafted_badly(capsys: pytest.CaptureFixture[str]) -> None:
    ratio = await odd_first.measure(argparse.Namespace(requests=3), "embedded")
    assert ratio.spread.median > 0.3
    odd, usual = (
        [int(number) for number in re.findall(r"(\d+) of (\d+)", line)[0]]
        for line in capsys.readouterr().out.splitlines()
    )
    assert odd[0] * usual[1] < usual[0] * odd[1]
