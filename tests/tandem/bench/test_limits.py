"""The arithmetic of the benchmark."""

import random
import statistics

import pytest

from tandem.bench.limits import (
    Limits,
    Ratio,
    Spread,
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


def test_limits_are_those_of_the_best_number_of_drafts() -> None:
    free = Limits.of(0.8, 4, 0.05, 0.3, 1.0)
    assert free.serial == pytest.approx(serial_limit(0.8, 4, 0.05, 0.3))
    assert free.overlapped == free.priced == pytest.approx(tokens_per_round(0.8, 4))
    costly = Limits.of(0.5, 8, 0.5, 0.0, 1.0)
    assert costly.serial == 1.0, "one draft alone brings 1.5 tokens for 1.5 steps"
    assert costly.overlapped == pytest.approx(tokens_per_round(0.5, 2)), "two drafts take as long as one step"
    assert Limits.of(0.0, 4, 0.1, 0.1, 3.0) == Limits(1.0, 1.0, 1.0)


def test_the_priced_limit_pays_for_verification() -> None:
    limits = Limits.of(0.9, 4, 0.01, 0.0, 3.0)
    assert limits.overlapped == pytest.approx(tokens_per_round(0.9, 4))
    by_hand = [tokens_per_round(0.9, j) / (1 + 2 * j / 4) for j in range(1, 5)]
    assert limits.priced == pytest.approx(max(by_hand))
    assert Limits.of(0.9, 4, 0.01, 0.0, 0.9).priced == limits.overlapped, "cheaper than a step it never is"


def test_spread() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([1, 2], 0.5) == 1.5
    assert Spread.of([1, 2, 3, 4, 5]) == Spread(3, 2, 4)
    assert Spread.of([1, 2, 3, 4, 5]).show() == "3.0 (2.0–4.0)"


def test_the_error_of_a_ratio_is_that_of_the_median_of_pairs() -> None:
    generator = random.Random(0)
    samples = [Ratio.of([generator.gauss(0.97, 0.05) for _ in range(25)], [1.0] * 25) for _ in range(400)]
    medians = [sample.spread.median for sample in samples]
    assert statistics.fmean(medians) == pytest.approx(0.97, abs=0.002)
    assert statistics.fmean(sample.error for sample in samples) == pytest.approx(statistics.stdev(medians), rel=0.15)
