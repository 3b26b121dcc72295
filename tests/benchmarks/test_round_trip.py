"""The stations of a round are functions that exist, and what is told of them is right."""

import functools
import json
import subprocess
import sys
from importlib import import_module

import pytest

from benchmarks.round_trip import durations
from benchmarks.stations import DIRECT, RELAYED
from specdec.errors import InternalError


@pytest.mark.parametrize("place", sorted({place for _, place, _ in (*DIRECT.values(), *RELAYED.values())}))
def test_stations_are_functions_of_the_services(place):
    module, _, path = place.partition(":")
    assert callable(functools.reduce(getattr, path.split("."), import_module(module)))


def passes(stations, start_us, steps_us):
    """One round: its stations at the times that the steps between them add up to, in nanoseconds."""
    times = [start_us + sum(steps_us[:index]) for index in range(len(stations))]
    return [(station, 1000 * at) for station, at in zip(stations, times, strict=True)]


@pytest.mark.parametrize("stations", [DIRECT, RELAYED])
def test_medians_are_between_neighbours_and_rounds_out_of_order_do_not_count(stations):
    first, steps = next(iter(stations)), list(range(10, 10 + len(stations)))
    total = sum(steps)
    events = [event for index in range(5) for event in passes(stations, index * total, steps)]
    late = passes(stations, 5 * total, [1000] * len(steps))
    events += [late[0], late[2], late[1], *late[3:], (first, 1000 * (5 * total + 99_999))]
    num_rounds, medians = durations(events, stations)
    assert num_rounds == 5
    assert list(medians.values()) == steps
    assert list(medians)[-1] == first


def test_stations_that_no_round_passes_are_no_result():
    events = [event for index in range(5) for event in passes(DIRECT, 100 * index, [1] * len(DIRECT))]
    with pytest.raises(InternalError, match="0 of 4 rounds"):
        durations([event for event in events if event[0] != "draft: drafted"], DIRECT)


@pytest.mark.e2e
@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_whole_command(tmp_path):
    command = [sys.executable, "-m", "benchmarks.round_trip", "--seconds", "1"]
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], check=True, capture_output=True, timeout=200)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [each["route"] for each in result["rounds"]] == ["direct", "frames", "grpc", "one process"]
    for each, stations in zip(result["rounds"], (DIRECT, RELAYED, RELAYED), strict=False):
        assert set(each["station_us"]) == set(stations)
        assert all(20 < cpu_us < 50_000 for cpu_us in each["cpu_us"].values())
        # The stations are all of a round, so they add up to it, about: medians do not add up exactly.
        assert 0.5 < sum(each["station_us"].values()) / each["round_us"] < 1.5
