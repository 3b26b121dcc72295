import random

import pytest

from specdec.scheduling.acceptance import FIRST_GUESS, Acceptance


def play(acceptance, rates, rounds, k, seed=0):
    """Rounds of k tokens, the j-th accepted with ``rates[j]``."""
    source = random.Random(seed)
    for _ in range(rounds):
        accepted = 0
        while accepted < k and source.random() < rates[accepted]:
            accepted += 1
        acceptance.observe(k, accepted)


def test_nothing_seen_is_the_first_guess():
    assert Acceptance(half_life=10).rates(3) == [FIRST_GUESS] * 3
    assert Acceptance(half_life=10).survival(2) == pytest.approx([FIRST_GUESS, FIRST_GUESS**2])


def test_rates_by_position_are_learned():
    acceptance = Acceptance(half_life=2000)
    play(acceptance, [0.9, 0.5, 0.2], rounds=4000, k=3)
    assert acceptance.rates(3) == pytest.approx([0.9, 0.5, 0.2], abs=0.05)
    assert acceptance.survival(3) == pytest.approx([0.9, 0.45, 0.09], abs=0.05)


def test_survival_never_grows():
    acceptance = Acceptance(half_life=5)
    play(acceptance, [0.1, 0.99, 0.99, 0.99], rounds=50, k=4)
    survival = acceptance.survival(8)
    assert survival == sorted(survival, reverse=True)


def test_old_evidence_fades():
    acceptance = Acceptance(half_life=10)
    play(acceptance, [1.0, 1.0], rounds=100, k=2)
    assert acceptance.rates(1)[0] > 0.95
    play(acceptance, [0.0, 0.0], rounds=30, k=2)
    assert acceptance.rates(1)[0] < 0.25


def test_a_position_that_is_not_tried_any_more_falls_back_to_the_one_before():
    acceptance = Acceptance(half_life=10)
    play(acceptance, [1.0, 0.0], rounds=50, k=2)
    assert acceptance.rates(2)[1] < 0.2
    play(acceptance, [1.0], rounds=200, k=1)
    assert acceptance.rates(2)[1] > 0.8


def test_the_totals_are_the_prior_of_a_session():
    totals = Acceptance(half_life=1000)
    play(totals, [0.1, 0.1], rounds=500, k=2)
    fresh = Acceptance(totals, half_life=20)
    assert fresh.rates(1)[0] == pytest.approx(0.1, abs=0.05)
    play(fresh, [0.95, 0.95], rounds=30, k=2)
    assert fresh.rates(1)[0] > 0.7
    assert totals.rates(1)[0] < 0.2


def test_what_was_asked_for_and_not_drafted_counts_as_rejected():
    acceptance = Acceptance(half_life=100)
    for _ in range(50):
        acceptance.observe(4, 0)
    assert acceptance.rates(1)[0] < 0.1
    before = acceptance.rates(4)
    acceptance.observe(0, 0)
    assert acceptance.rates(4) == pytest.approx(before, rel=0.05)
