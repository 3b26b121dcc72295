"""Prices of rounds: compared in windows of one mode that follow each other, learned by trials that become rare."""

from __future__ import annotations

import pytest

from gateway.pacing.round_times import RECENT, TOKEN, TRIAL_WINDOWS, WINDOW_NS, Others, RoundTimes
from gateway.pacing.stats import Mode

MS = 1_000_000
WINDOW_MS = WINDOW_NS // MS


def record(times, cycle_ms, *, num_asked=0, num_tokens=1, window_ms=WINDOW_MS, sessions=1, others=(0, 0)):
    """Cycles of one kind for so long; how many windows ended that change what sessions choose by. ``others``: tokens
    and milliseconds of other sessions in each.
    """
    count, told = -(-window_ms // cycle_ms), Others(others[0], others[1] * MS)
    return sum(times.record(sessions, int(cycle_ms * MS), num_tokens, num_asked, told) for _ in range(int(count)))


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


def half_lost(times):
    """A trial of rounds that take twice as long as plain tokens of 2.5 ms."""
    assert times.trial is Mode.SPECULATIVE
    record(times, 10.0, num_asked=4, num_tokens=2)
    assert times.trial is None, "one window is enough"


def windows_until_trial(times, most=1000):
    """Plain windows of 2.5 ms a token until the next trial."""
    for window in range(most):
        if times.trial is not None:
            return window
        record(times, 2.5)
    raise AssertionError("no trial")


def test_trials_follow_a_fresh_start_soon_and_become_rare():
    times = started(2.5)
    pauses = []
    for _ in range(6):
        half_lost(times)
        pauses.append(windows_until_trial(times))
    assert pauses[:2] == [5, 17]
    assert set(pauses[2:]) == {51}, "a trial that loses half of its time is a fiftieth of it"


def test_what_is_lost_after_a_trial_until_all_sessions_are_back_counts_too():
    times = started(2.5)
    for _ in range(6):
        half_lost(times)
        windows_until_trial(times)
    half_lost(times)
    for _ in range(2):
        record(times, 10.0, window_ms=20, num_asked=4, num_tokens=2)
        record(times, 5.0, window_ms=30)
    assert windows_until_trial(times) == pytest.approx(150, abs=2)


def test_a_trial_that_nobody_joins_ends_and_is_followed_by_a_pause():
    times = started()
    for _ in range(TRIAL_WINDOWS):
        assert times.trial is Mode.SPECULATIVE
        record(times, 2.0)
    assert times.trial is None
    record(times, 2.0, window_ms=4 * TRIAL_WINDOWS * WINDOW_MS - WINDOW_MS)
    assert times.trial is None
    record(times, 2.0)
    assert times.trial is Mode.SPECULATIVE


@pytest.mark.parametrize(("sessions", "pays"), [(1, True), (2, False)])
def test_drafting_that_is_slower_than_plain_decoding_ends_until_the_next_trial(sessions, pays):
    """Of one session, the texts of so few windows say nothing."""
    times = started(2.5)
    for _ in range(2):
        half_lost(times)
        windows_until_trial(times)
    half_lost(times)
    assert times.pays, "a trial alone does not tell: each text drafts as much as is best for it"
    for _ in range(RECENT):
        assert times.pays
        record(times, 5.0, window_ms=30 * sessions, num_asked=4, num_tokens=2, sessions=sessions)  # fast enough
        record(times, 3.5, window_ms=21 * sessions, sessions=sessions)  # but these are held up by them
    assert times.pays is pays
    windows_until_trial(times)
    half_lost(times)
    assert times.pays


@pytest.mark.parametrize("slower", [1.0, 1.25, 1.5])
def test_what_sessions_that_draft_and_others_cost_each_other(slower):
    times = started(2.5)
    half_lost(times)
    assert times.mixing == 1.0
    for _ in range(3):
        record(times, 2.5 * slower, window_ms=20 * slower)
        record(times, 10.0 * slower, window_ms=30 * slower, num_asked=4, num_tokens=2)
    assert times.mixing == pytest.approx(slower)


def test_plain_tokens_beside_rounds_are_compared_with_nothing():
    """They took four times as long beside a tenth of rounds; the round would look cheap."""
    times = started()
    rounds(times, 6.0)
    for _ in range(6):
        rounds(times, 5.0, window_ms=5)
        record(times, 8.0, window_ms=45)
    assert times.round_cost(4) == pytest.approx(3.0)


def test_rounds_are_charged_with_what_other_sessions_lose():
    """One session drafts, two others have 3 ms a token instead of 2 meanwhile."""
    times = RoundTimes()
    record(times, 2.0, window_ms=8.0, others=(2, 4.0))
    assert times.trial is Mode.SPECULATIVE
    rounds(times, 6.0, others=(4, 12.0))
    assert times.round_cost(4) == pytest.approx((6.0 + 4 * (3.0 - 2.0)) / 2.0)


@pytest.mark.parametrize(("tokens", "pays"), [(2, False), (4, True)])
def test_one_session_ends_its_drafting_where_others_lose_more(tokens, pays):
    """It has 3 tokens in 4 ms instead of 2, two others should have 4 meanwhile."""
    times = RoundTimes()
    record(times, 2.0, window_ms=8.0, others=(2, 4.0))
    for _ in range(8 * RECENT):
        if times.pays:
            rounds(times, 4.0, others=(tokens, 8.0))
    assert times.pays is pays


@pytest.mark.parametrize(("tokens", "windows"), [(8, 25), (7, 50), (6, 75)])
def test_what_other_sessions_lose_by_trials_counts_too(tokens, windows):
    """After the first ones, whose pauses grow. The trial's session loses a quarter of a window, two others nothing, as
    much, or twice as much.
    """
    times = RoundTimes()
    plain, tried = {"others": (2, 5.0)}, {"num_asked": 4, "num_tokens": 3, "others": (tokens, 20.0)}
    record(times, 2.5, window_ms=10.0, **plain)
    for _ in range(6):
        assert times.trial is Mode.SPECULATIVE
        record(times, 10.0, **tried)
        num_windows = 0
        while times.trial is None:
            record(times, 2.5, **plain)
            num_windows += 1
    assert num_windows == pytest.approx(windows, abs=2)


def test_a_load_that_was_not_seen_is_like_the_nearest_one():
    times = started()
    rounds(times, 10.0)
    other = RoundTimes(times)
    assert other.round_cost(4) == times.round_cost(4) == pytest.approx(5.0)
    record(other, 2.0)
    assert other.trial is None, "no trial at once"
    record(other, 2.0, window_ms=4 * WINDOW_MS)
    assert other.trial is Mode.SPECULATIVE


def test_windows_that_change_no_choice_are_not_told():
    times, num_told, num_trials = RoundTimes(), 0, 0
    for _ in range(50_000):
        is_round, was_tried = times.trial is Mode.SPECULATIVE, times.trial
        cycle_ns = 10 * MS if is_round else 2 * MS
        num_told += times.record(1, cycle_ns, 2 if is_round else 1, 4 * is_round, Others())
        num_trials += was_tried is not None and times.trial is None
    assert num_trials > 5
    assert 2 * num_trials <= num_told <= 4 * num_trials + 8, "of 2,000 windows"
