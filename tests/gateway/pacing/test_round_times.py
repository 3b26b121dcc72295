"""Prices of rounds: compared in windows of one mode that follow each other, learned by trials that become rare."""

from __future__ import annotations

import pytest

from gateway.pacing.round_times import TOKEN, TRIAL_WINDOWS, WINDOW_NS, RoundTimes
from gateway.pacing.stats import Mode

MS = 1_000_000
WINDOW_MS = WINDOW_NS // MS


def record(times, cycle_ms, *, num_asked=0, num_tokens=1, window_ms=WINDOW_MS, sessions=1, may_draft=True):
    """Cycles of one kind for so long; how many windows they ended."""
    count = -(-window_ms // cycle_ms)
    return sum(
        times.record(sessions, int(cycle_ms * MS), num_tokens, num_asked, may_draft=may_draft)
        for _ in range(int(count))
    )


def rounds(times, cycle_ms, **options):
    return record(times, cycle_ms, num_asked=4, num_tokens=3, **options)


def started(cycle_ms=2.0):
    """A plain token is known from the first four verdicts."""
    times = RoundTimes()
    record(times, cycle_ms, window_ms=4 * cycle_ms)
    return times


def test_the_first_verdicts_are_enough_for_a_plain_token():
    assert not RoundTimes().is_measured
    times = started()
    assert times.is_measured
    assert times.trial is Mode.SPECULATIVE


def test_a_round_is_compared_with_plain_tokens():
    times = started()
    rounds(times, 6.0)
    assert times.round_cost(4) == pytest.approx(3.0)
    assert times.round_cost(0) == pytest.approx(3.0 / (1.0 + 4 * TOKEN))


def test_a_machine_that_becomes_slower_changes_no_price():
    """Windows that follow each other are compared, so what took twice as long a second ago says nothing."""
    times, slow = started(), 1.0
    for _ in range(12):
        record(times, 2.0 * slow, window_ms=200)
        rounds(times, 6.0 * slow, window_ms=200)
        assert times.round_cost(4) == pytest.approx(3.0)
        record(times, 2.0 * slow, window_ms=200)
        slow *= 1.5
        record(times, 2.0 * slow, window_ms=200)


def test_a_stall_in_a_trial_counts_for_nothing():
    times = started()
    for _ in range(3):
        rounds(times, 6.0)
        record(times, 2.0)
    rounds(times, 500.0, window_ms=2000)
    record(times, 2.0)
    assert times.round_cost(4) == pytest.approx(3.0)


def test_windows_of_both_modes_say_nothing_of_either():
    times = started()
    before = times.round_cost(4)
    for _ in range(60):
        record(times, 20.0, window_ms=20)
        rounds(times, 20.0, window_ms=20)
    assert times.round_cost(4) == before


def test_plain_tokens_among_rounds_are_subtracted():
    times = started()
    for _ in range(3):
        record(times, 2.0, window_ms=4)
        rounds(times, 6.0, window_ms=48)
    assert times.round_cost(4) == pytest.approx(3.0, rel=0.01)


def test_trials_follow_a_fresh_start_soon_and_become_rare():
    times, lasted, begun = started(), [], -1
    for window in range(300):
        if times.trial is Mode.SPECULATIVE:
            lasted.append(window - begun)
            rounds(times, 5.0)
            assert times.trial is None, "one window is enough"
            times.pause(0.5)
            begun = window + 1
        else:
            record(times, 2.0)
    assert lasted[:4] == [1, 5, 17, 51]
    assert set(lasted[3:]) == {51}, "a trial that loses half of its time is a fiftieth of it"


def test_a_trial_that_nobody_joins_ends_and_one_of_sessions_that_never_draft_is_followed_by_a_pause():
    times = started()
    for _ in range(TRIAL_WINDOWS):
        assert times.trial is Mode.SPECULATIVE
        record(times, 2.0)
    assert times.trial is None
    times.pause(0.0)
    record(times, 2.0, window_ms=4 * TRIAL_WINDOWS * WINDOW_MS - WINDOW_MS)
    assert times.trial is None
    record(times, 2.0)
    assert times.trial is Mode.SPECULATIVE
    for _ in range(TRIAL_WINDOWS):
        record(times, 2.0, may_draft=False)
    assert times.trial is None
    record(times, 2.0, window_ms=4 * TRIAL_WINDOWS * WINDOW_MS - WINDOW_MS)
    assert times.trial is None, "as late as after the trial before: sessions that may draft would begin with one"
    record(times, 2.0)
    assert times.trial is Mode.SPECULATIVE


def test_plain_tokens_beside_rounds_are_compared_with_nothing():
    """They took four times as long beside a tenth of rounds; the round would look cheap."""
    times = started()
    rounds(times, 6.0)
    for _ in range(6):
        rounds(times, 5.0, window_ms=5)
        record(times, 8.0, window_ms=45)
    assert times.round_cost(4) == pytest.approx(3.0)


def test_a_load_that_was_not_seen_is_like_the_nearest_one():
    times = started()
    rounds(times, 10.0)
    times.pause(0.5)
    other = RoundTimes(times)
    assert other.round_cost(4) == times.round_cost(4) == pytest.approx(5.0)
    record(other, 2.0)
    assert other.trial is None, "no trial at once"
    record(other, 2.0, window_ms=4 * WINDOW_MS)
    assert other.trial is Mode.SPECULATIVE


@pytest.mark.parametrize(("accepted", "loss"), [(0, 0.6), (1, 0.2), (4, 0.0)])
def test_what_a_trial_loses_is_measured_in_its_tokens(accepted, loss):
    times = started()
    record(times, 5.0, num_asked=4, num_tokens=1 + accepted)
    assert times.trial is None
    assert times.loss == pytest.approx(loss, abs=0.01)


def test_trials_may_lose_a_share_of_the_time_of_sessions_that_may_draft():
    times = started()
    rounds(times, 5.0)
    times.pause(0.5)
    record(times, 2.0, window_ms=100 * WINDOW_MS, may_draft=False)
    assert times.trial is None
    record(times, 2.0, window_ms=4 * WINDOW_MS)
    assert times.trial is Mode.SPECULATIVE
