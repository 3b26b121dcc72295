"""The arithmetic of the benchmark."""

import pytest

from tandem.bench.limits import (
    Spread,
    acceptance_per_token,
    overlapped_limit,
    quantile,
    serial_limit,
    tokens_per_round,
)


def test_the_documented_example() -> None:
    """α = 0.8, k chosen freely, c = 0.05, d = 0.3: 2.55 serial, 4.82 overlapped."""
    assert max(serial_limit(0.8, k, 0.05, 0.3) for k in range(30)) == pytest.approx(2.55, abs=0.01)
    assert max(overlapped_limit(0.8, k, 0.05, 0.3) for k in range(30)) == pytest.approx(4.82, abs=0.04)


def test_ends() -> None:
    assert tokens_per_round(1.0, 4) == 5
    assert tokens_per_round(0.0, 4) == 1
    assert tokens_per_round(0.5, 0) == 1
    assert serial_limit(0.5, 0, 0.1, 0.0) == 1
    assert overlapped_limit(0.9, 4, 1.0, 0.0) == tokens_per_round(0.9, 4) / 4


def test_acceptance_is_recovered_from_its_own_histogram() -> None:
    alpha, k = 0.7, 4
    histogram = [round(10**6 * alpha**a * ((1 - alpha) if a < k else 1)) for a in range(k + 1)]
    assert acceptance_per_token(histogram, k) == pytest.approx(alpha, abs=1e-4)
    mean = sum(a * n for a, n in enumerate(histogram)) / sum(histogram) + 1
    assert mean == pytest.approx(tokens_per_round(alpha, k), abs=1e-4)


def test_acceptance_of_nothing_is_zero() -> None:
    assert acceptance_per_token([], 4) == 0.0
    assert acceptance_per_token([5], 4) == 0.0
    assert acceptance_per_token([0, 0, 5], 2) == 1.0


def test_spread() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([1, 2], 0.5) == 1.5
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert Spread.of([1, 2, 3, 4, 5]).show() == "3.0 (2.0–4.0)"
