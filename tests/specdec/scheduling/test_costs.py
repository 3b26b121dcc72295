import random
from itertools import pairwise

import pytest

from specdec.scheduling.costs import GROWTH, StepCost

MS = 1e6


def knee(rows):
    """A CPU's step: flat while the weights are read, then linear."""
    return (24.0 + 0.2 * rows + 3.0 * max(0, rows - 7)) * MS


def test_nothing_observed_is_zero():
    assert StepCost().predict(4, 1, 100) == 0.0


def test_one_row_count_grows_slowly_to_the_right_and_looks_cheap_to_the_left():
    cost = StepCost()
    cost.observe(10, 2, 0, 20 * MS)
    assert cost.predict(20, 2, 0) == pytest.approx(20 * MS * (1 + GROWTH))
    assert cost.predict(5, 2, 0) == pytest.approx(10 * MS)


def test_a_knee_is_followed():
    cost, source = StepCost(), random.Random(0)
    for _ in range(2000):
        rows = source.choice((1, 2, 3, 5, 8, 10, 16, 20, 32, 40, 64))
        cost.observe(rows, rows, 0, knee(rows) * source.lognormvariate(0, 0.05))
    for rows in (1, 4, 5, 8, 12, 16, 28, 40, 60):
        assert cost.predict(rows, rows, 0) == pytest.approx(knee(rows), rel=0.08), rows


def test_more_rows_never_cost_less():
    cost, source = StepCost(), random.Random(1)
    for _ in range(500):
        rows = source.randint(1, 100)
        cost.observe(rows, 1, 0, source.lognormvariate(0, 1.0) * MS)
    times = [cost.predict(rows, 1, 0) for rows in range(1, 200)]
    assert all(later >= earlier - 1e-6 for earlier, later in pairwise(times))


def test_a_single_outlier_moves_the_estimate_little():
    cost = StepCost()
    for _ in range(50):
        cost.observe(5, 1, 0, 10 * MS)
    cost.observe(5, 1, 0, 1000 * MS)
    assert cost.predict(5, 1, 0) < 11 * MS


def test_a_cold_first_step_is_outvoted():
    cost = StepCost()
    cost.observe(5, 1, 0, 500 * MS)
    for _ in range(2):
        cost.observe(5, 1, 0, 10 * MS)
    assert cost.predict(5, 1, 0) == pytest.approx(10 * MS)


def test_a_lasting_change_is_followed():
    cost = StepCost()
    for _ in range(100):
        cost.observe(5, 1, 0, 10 * MS)
    for _ in range(150):
        cost.observe(5, 1, 0, 20 * MS)
    assert cost.predict(5, 1, 0) == pytest.approx(20 * MS, rel=0.05)


def test_a_row_count_that_is_not_seen_any_more_is_not_forgotten():
    cost = StepCost()
    for _ in range(20):
        cost.observe(1, 1, 0, 10 * MS)
    for _ in range(5000):
        cost.observe(5, 1, 0, 15 * MS)
    assert cost.predict(1, 1, 0) == pytest.approx(10 * MS)


def test_context_and_sessions_are_told_from_rows():
    cost, source = StepCost(), random.Random(2)

    def truth(rows, sessions, context):
        return (5.0 + 0.1 * rows + 0.2 * sessions + 0.0005 * context) * MS

    for _ in range(4000):
        rows = source.choice((16, 32, 64))
        sessions = source.randint(rows // 5 + 1, rows)
        context = source.randint(100, 20_000)
        cost.observe(rows, sessions, context, truth(rows, sessions, context) * source.lognormvariate(0, 0.03))
    for rows, sessions, context in ((32, 10, 1000), (32, 30, 1000), (32, 10, 18_000), (64, 20, 9000)):
        assert cost.predict(rows, sessions, context) == pytest.approx(truth(rows, sessions, context), rel=0.12)


def test_noise_alone_makes_no_slopes():
    cost, source = StepCost(), random.Random(3)
    for _ in range(3000):
        cost.observe(32, source.randint(6, 32), source.randint(100, 20_000), 10 * MS * source.lognormvariate(0, 0.1))
    assert cost.predict(32, 32, 20_000) < 1.1 * cost.predict(32, 6, 100)


def test_zero_times_and_rows_are_harmless():
    cost = StepCost()
    cost.observe(0, 0, 0, 0)
    assert cost.predict(1, 1, 0) >= 0.0
