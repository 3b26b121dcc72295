"""When a draft is too far away to be waited for."""

from __future__ import annotations

import pytest

from target_service.trip_times import HELD_UP, LEAST, MEMORY, TripTimes


def times_of(trip_ns: int, step_ns: int, count: int = LEAST, num_sessions: int = 1) -> TripTimes:
    times = TripTimes()
    for _ in range(count):
        times.add_step(step_ns, num_sessions)
        times.add_trip(trip_ns)
    return times


@pytest.mark.parametrize(
    ("trip_ns", "is_far", "num_steps"), [(0, False, 0), (290, False, 1), (310, True, 1), (2500, True, 3)]
)
def test_a_trip_is_compared_with_a_step(trip_ns: int, is_far: bool, num_steps: int) -> None:
    times = times_of(trip_ns, 1000)
    assert (times.is_far, times.num_steps) == (is_far, num_steps)


@pytest.mark.parametrize(("num_sessions", "is_far"), [(1, False), (2, True), (8, True)])
def test_sessions_that_share_steps_stream_from_a_shorter_trip_on(num_sessions: int, is_far: bool) -> None:
    assert times_of(150, 1000, num_sessions=num_sessions).is_far is is_far
    assert not times_of(90, 1000, num_sessions=num_sessions).is_far


def test_a_single_slow_trip_decides_nothing() -> None:
    assert not times_of(900, 1000, LEAST - 1).is_far
    times = times_of(10, 1000)
    times.add_trip(10**9)
    assert not times.is_far


def test_between_the_two_shares_it_stays_what_it_is() -> None:
    times = times_of(500, 1000)
    for trip_ns, is_far in ((250, True), (150, False), (250, False), (500, True)):
        for _ in range(MEMORY):
            times.add_trip(trip_ns)
        assert times.is_far is is_far


def test_what_is_taken_for_true_holds_until_it_is_measured() -> None:
    times = TripTimes(is_far=True)
    times.add_step(1000, 1)
    for _ in range(LEAST - 1):
        times.add_trip(10)
    assert times.is_far
    times.add_trip(10)
    assert not times.is_far


def test_a_draft_on_this_machine_is_never_far() -> None:
    times = TripTimes(is_fixed=True)
    for _ in range(MEMORY):
        times.add_step(1, 1)
        times.add_trip(10**9)
    assert not times.is_far


def test_how_long_a_chain_takes_leaves_out_the_longest() -> None:
    """Of a draft that a step may wait for."""
    times, attached = TripTimes(is_far=True), TripTimes(is_far=True, is_fixed=True)
    for answer_ns in (10, 900, 30):
        assert times.answer_ns == 0
        times.add_answer(answer_ns)
        attached.add_answer(answer_ns)
    assert (times.answer_ns, attached.answer_ns) == (30, 0)


def test_a_proposal_that_is_held_up_makes_a_draft_far_away_for_a_while() -> None:
    times = times_of(10, 1000)
    assert times.patience_s is None, "nothing was waited for yet"
    for wait_ns in (200, 400, 300):
        times.add_wait(wait_ns)
    assert times.patience_s == pytest.approx((2 * 400 + 1000) / 1e9)
    times.hold_up()
    for left in reversed(range(HELD_UP)):
        assert times.is_far
        times.add_trip(10)
        assert times.is_far is (left > 0)
    assert TripTimes(is_fixed=True).patience_s is None
