"""Connections where files are few."""

import resource

import pytest

from specdec.process.open_files import RESERVE, cap_connections


@pytest.mark.parametrize(
    ("soft", "num_other_files", "expected"),
    [
        (RESERVE + 10_000, 0, 4096),
        (RESERVE + 10_000, 1000, 4096),
        (RESERVE + 1000, 0, 500),
        (RESERVE + 1000, 200, 400),
        (RESERVE + 1000, 5000, 250),
        (RESERVE, 0, 1),
        (resource.RLIM_INFINITY, 5000, 4096),
    ],
)
def test_files_are_left_for_others(monkeypatch, soft, num_other_files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert cap_connections(4096, num_other_files=num_other_files) == expected
