"""Steps wait for rounds that are about to come in, where the wait is shorter than what a step of its own would cost."""

import pytest

from target_service.scheduler.round_coalescer import WARM_UP, RoundCoalescer

MS = 1_000_000


def heavy(rows, sessions):
    """Reading the weights takes 20 ms, a row 1."""
    return (20 + rows) * MS


def light(rows, sessions):
    """Only rows cost something."""
    return rows * MS


def taught(turnaround_ms=3):
    coalescer, now_ns = RoundCoalescer(), 0
    for _ in range(4 * WARM_UP):
        coalescer.left("taught", 5, now_ns)
        now_ns += turnaround_ms * MS
        coalescer.came("taught", now_ns)
    return coalescer, now_ns


def test_a_heavy_step_waits_for_those_who_are_about_to_come():
    coalescer, now_ns = taught()
    coalescer.left("a", 5, now_ns)
    until_ns = coalescer.wait_until(5, 1, now_ns + MS, heavy)
    assert until_ns == pytest.approx(now_ns + 3 * MS, abs=MS / 2)
    coalescer.came("a", now_ns + 2 * MS)
    assert coalescer.wait_until(10, 2, now_ns + 2 * MS, heavy) == now_ns + 2 * MS


def test_a_step_without_a_cost_of_its_own_does_not_wait():
    coalescer, now_ns = taught()
    coalescer.left("a", 5, now_ns)
    assert coalescer.wait_until(5, 1, now_ns, light) == now_ns


def test_a_wait_longer_than_what_it_saves_is_not_begun():
    coalescer, now_ns = taught(turnaround_ms=25)
    coalescer.left("a", 5, now_ns)
    assert coalescer.wait_until(5, 1, now_ns, heavy) == now_ns
    assert coalescer.wait_until(5, 1, now_ns + 15 * MS, heavy) > now_ns + 15 * MS


def test_who_does_not_come_is_waited_for_once():
    coalescer, now_ns = taught()
    coalescer.left("gone", 5, now_ns)
    until_ns = coalescer.wait_until(5, 1, now_ns, heavy)
    assert until_ns > now_ns
    assert coalescer.wait_until(5, 1, until_ns, heavy) == until_ns
    assert coalescer.wait_until(5, 1, until_ns + 1, heavy) == until_ns + 1


def test_nobody_waits_for_who_is_closed():
    coalescer, now_ns = taught()
    coalescer.left("closed", 5, now_ns)
    coalescer.forget("closed")
    coalescer.forget("never seen")
    assert not coalescer.expects(now_ns)
    assert coalescer.wait_until(5, 1, now_ns, heavy) == now_ns


def test_nobody_waits_before_turnarounds_are_known():
    coalescer = RoundCoalescer()
    for step in range(WARM_UP - 1):
        coalescer.left("a", 5, step)
        coalescer.came("a", step)
    coalescer.left("a", 5, 100)
    assert coalescer.wait_until(5, 1, 100, heavy) == 100


def test_one_long_absence_does_not_make_everybody_wait_long():
    coalescer, now_ns = taught()
    coalescer.left("late", 5, now_ns)
    now_ns += 1000 * MS
    coalescer.came("late", now_ns)
    coalescer.left("a", 5, now_ns)
    assert coalescer.wait_until(5, 1, now_ns, heavy) < now_ns + 10 * MS


def test_a_session_is_expected_for_a_while_after_its_verdict():
    for coalescer, now_ns, turnaround_ms in ((*taught(), 3), (RoundCoalescer(), 0, 10)):
        assert not coalescer.expects(now_ns)
        coalescer.left("a", 5, now_ns)
        assert coalescer.expects(now_ns + turnaround_ms * MS)
        assert not coalescer.expects(now_ns + 10 * turnaround_ms * MS)
        coalescer.came("a", now_ns + 10 * turnaround_ms * MS)
        assert not coalescer.expects(now_ns + 10 * turnaround_ms * MS)
