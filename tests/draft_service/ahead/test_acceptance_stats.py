"""What verdicts teach about the coming ones."""

import random

import pytest

from draft_service.ahead.acceptance_stats import (
    FIRST_ACCEPTANCE,
    FIRST_AFTER_ALL,
    SERVICE_MEMORY,
    SESSION_MEMORY,
    AcceptanceStats,
    Rate,
    SessionStats,
)


def test_a_rate_begins_with_what_is_assumed_and_follows_what_is_seen():
    rate = Rate(SERVICE_MEMORY)
    assert rate.estimate(0.3) == 0.3
    rng = random.Random(0)
    for _ in range(4000):
        rate.count(rng.random() < 0.8)
    assert rate.estimate(0.3) == pytest.approx(0.8, abs=0.05)
    for _ in range(6000):
        rate.count(False)
    assert rate.estimate(0.3) < 0.01


def test_acceptance_by_position_is_conditional_on_what_came_before():
    """Only the tokens up to the first rejection were judged."""
    stats = AcceptanceStats()
    session = SessionStats(stats)
    for _ in range(300):
        session.count(2, 3)  # two accepted, the third not; of the fourth nothing is known
    assert session.acceptance(0) > 0.95
    assert session.acceptance(1) > 0.95
    assert session.acceptance(2) < 0.05
    assert session.acceptance(3) == FIRST_ACCEPTANCE


def test_a_session_leans_on_its_service_and_then_goes_its_own_way():
    stats = AcceptanceStats()
    old = SessionStats(stats)
    for _ in range(500):
        old.count(0, 1)
    young = SessionStats(stats)
    assert young.acceptance(0) == stats.acceptance(0) < 0.05
    for _ in range(30):
        young.count(1, 1)
    assert young.acceptance(0) > 0.8
    assert stats.acceptance(0) < 0.2
    assert SESSION_MEMORY < SERVICE_MEMORY


def test_guesses_are_counted_by_rank():
    stats = AcceptanceStats()
    for token in [7] * 60 + [8] * 40:
        stats.after_all.count(token, [7, 8, 9])
    assert stats.after_all.probabilities[0] == pytest.approx(0.6, abs=0.05)
    assert stats.after_all.probabilities[1] == pytest.approx(0.4, abs=0.08)
    assert stats.after_all.probabilities[2] < 0.01
    assert stats.after_all.probabilities[3] == FIRST_AFTER_ALL[3]  # there was no fourth guess
