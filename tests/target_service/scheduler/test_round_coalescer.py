"""Steps wait for rounds that are about to come in, where that has been faster."""

import heapq
import random

import pytest

from target_service.scheduler.round_coalescer import FIRST_NS, RETRY_INTERVAL, WARM_UP, RoundCoalescer

MS = 1_000_000


def taught(turnaround_ms=3):
    """A coalescer that knows a turnaround and waits."""
    coalescer, now_ns = RoundCoalescer(), 0
    for _ in range(4 * WARM_UP):
        coalescer.left("taught", now_ns)
        now_ns += turnaround_ms * MS
        coalescer.came("taught", now_ns)
    return coalescer, now_ns


def test_a_step_waits_for_those_who_are_about_to_come():
    coalescer, now_ns = taught()
    coalescer.left("a", now_ns)
    assert coalescer.wait_until(now_ns + MS) == pytest.approx(now_ns + 3 * MS, abs=MS / 2)
    coalescer.came("a", now_ns + 2 * MS)
    assert coalescer.wait_until(now_ns + 2 * MS) == now_ns + 2 * MS


def test_who_does_not_come_is_waited_for_once():
    coalescer, now_ns = taught()
    coalescer.left("gone", now_ns)
    until_ns = coalescer.wait_until(now_ns)
    assert until_ns > now_ns
    assert coalescer.wait_until(until_ns) == until_ns
    assert coalescer.wait_until(until_ns + 1) == until_ns + 1


def test_nobody_waits_for_who_is_closed():
    coalescer, now_ns = taught()
    coalescer.left("closed", now_ns)
    coalescer.forget("closed")
    coalescer.forget("never seen")
    assert not coalescer.expects(now_ns)
    assert coalescer.wait_until(now_ns) == now_ns


def test_until_turnarounds_are_known_a_step_waits_for_a_bounded_time():
    coalescer = RoundCoalescer()
    coalescer.left("a", 100)
    assert coalescer.wait_until(200) == 100 + FIRST_NS


def test_one_long_absence_does_not_make_everybody_wait_long():
    coalescer, now_ns = taught()
    coalescer.left("late", now_ns)
    now_ns += 1000 * MS
    coalescer.came("late", now_ns)
    coalescer.left("a", now_ns)
    assert coalescer.wait_until(now_ns) < now_ns + 10 * MS


def test_turnarounds_that_a_step_has_held_up_do_not_count():
    coalescer, now_ns = taught()
    for _ in range(100):
        coalescer.left("held up", now_ns)
        coalescer.step_begins()
        now_ns += 50 * MS
        coalescer.came("held up", now_ns)
    coalescer.left("a", now_ns)
    assert coalescer.wait_until(now_ns) < now_ns + 4 * MS


def test_a_session_is_expected_for_a_while_after_its_verdict():
    for coalescer, now_ns, turnaround_ms in ((*taught(), 2), (RoundCoalescer(), 0, 10)):
        assert not coalescer.expects(now_ns)
        coalescer.left("a", now_ns)
        assert coalescer.expects(now_ns + turnaround_ms * MS)
        assert not coalescer.expects(now_ns + 10 * turnaround_ms * MS)
        coalescer.came("a", now_ns + 10 * turnaround_ms * MS)
        assert not coalescer.expects(now_ns + 10 * turnaround_ms * MS)


@pytest.mark.parametrize(("step_ms", "waits"), [(8, False), (20, True)])
def test_others_that_are_ready_wait_for_a_share_of_a_step(step_ms, waits):
    coalescer, now_ns = taught()
    coalescer.step_ended(0, 1, now_ns, step_ms * MS)
    coalescer.left("a", now_ns)
    assert coalescer.wait_until(now_ns) > now_ns
    assert (coalescer.wait_until(now_ns, has_others=True) > now_ns) is waits


@pytest.mark.parametrize(
    ("due_ms", "num_ready", "until_ms"),
    [((5,), 1, 5), ((6,), 1, 0), ((5,), 2, 0), ((2, 9), 2, 2), ((5, 3), 2, 5), ((1, 2, 3, 9), 8, 0)],
)
def test_a_step_waits_for_chains_that_are_due(due_ms, num_ready, until_ms):
    """Half a step of 10 ms at most, times the share of the sessions that get one."""
    coalescer = RoundCoalescer()
    coalescer.step_ended(0, 1, 0, 10 * MS)
    due_ns = [7 * MS + due * MS for due in due_ms]
    assert coalescer.wait_for_chains(due_ns, num_ready, 7 * MS) == (7 + until_ms) * MS


def test_steps_without_sessions_that_draft_are_no_window():
    coalescer = RoundCoalescer()
    for now_ns in range(100):
        coalescer.step_begins()
        coalescer.step_ended(0, 0, now_ns)
        coalescer.step_ended(0, 5, now_ns)
    coalescer.left("a", 100)
    coalescer.step_ended(1, 0, 100)
    coalescer.forget("a")
    coalescer.step_ended(0, 0, 100)
    assert coalescer.wait_until(100) == 100


class Always(RoundCoalescer):
    """Waits in every window, whoever is ready."""

    def wait_until(self, now_ns, *, has_others=False):
        return super().wait_until(now_ns)

    def step_ended(self, *_):
        pass


class Never(Always):
    def wait_until(self, now_ns, *, has_others=False):
        return now_ns


def speed(coalescer, world, *, after=None, num_tokens=20_000):
    """Tokens per millisecond of sessions that draft four tokens, and of others that decode plainly; with ``after`` in
    that world once all tokens of the first one are there.
    """
    rng = random.Random(0)
    num_sessions, num_plain = world.get("num_sessions", 8), world.get("num_plain", 0)
    now_ns, order, done, start_ns = 0, 0, 0, 0
    coming = [(index, index, index) for index in range(num_sessions)]
    ready = set()
    while done < num_tokens or after:
        if done >= num_tokens:
            world, after, done, start_ns = after, None, 0, now_ns
        while coming and coming[0][0] <= now_ns:
            came_ns, _, session = heapq.heappop(coming)
            coalescer.came(session, came_ns)
            ready.add(session)
        until_ns = coalescer.wait_until(now_ns, has_others=num_plain > 0) if ready or num_plain else now_ns
        if not ready and not num_plain:
            now_ns = coming[0][0]
            continue
        if until_ns > now_ns:
            now_ns = min(until_ns, coming[0][0]) if coming else until_ns
            continue
        coalescer.step_begins()
        batch, ready = ready, set()
        step_ms = world["fixed_ms"] + world["row_ms"] * (5 * len(batch) + num_plain)
        step_ns = int(step_ms * rng.lognormvariate(0, 0.1) * MS)
        now_ns += step_ns
        tokens = sum(rng.choice((1, 2, 3, 4, 5)) for _ in batch) + num_plain
        done += tokens
        for session in sorted(batch):
            coalescer.left(session, now_ns)
            order += 1
            heapq.heappush(coming, (now_ns + int(world["draft_ms"] * rng.lognormvariate(0, 0.2) * MS), order, session))
        coalescer.step_ended(len(batch), tokens, now_ns, step_ns)
    return done / (now_ns - start_ns) * MS


WORLDS = {
    "weights cost most": {"fixed_ms": 40, "row_ms": 0.1, "draft_ms": 3},
    "rows cost most": {"fixed_ms": 0.2, "row_ms": 0.2, "draft_ms": 4},
    "a small target": {"fixed_ms": 1.2, "row_ms": 0.08, "draft_ms": 1},
    "a slow draft": {"fixed_ms": 2, "row_ms": 0.05, "draft_ms": 30},
    "two sessions": {"fixed_ms": 5, "row_ms": 0.1, "draft_ms": 6, "num_sessions": 2},
    "others decode plainly": {"fixed_ms": 3, "row_ms": 0.1, "draft_ms": 8, "num_sessions": 4, "num_plain": 8},
    "others decode plainly, in long steps": {
        "fixed_ms": 28,
        "row_ms": 0,
        "draft_ms": 3,
        "num_sessions": 7,
        "num_plain": 1,
    },
}


@pytest.mark.parametrize("world", WORLDS)
def test_the_faster_way_is_found(world):
    best = max(speed(Always(), WORLDS[world]), speed(Never(), WORLDS[world]))
    assert speed(RoundCoalescer(), WORLDS[world]) > 0.95 * best


def test_the_worlds_differ():
    """Each way is the better one somewhere, by far."""
    gains = [speed(Always(), world) / speed(Never(), world) for world in WORLDS.values()]
    assert max(gains) > 1.2
    assert min(gains) < 0.8


def test_a_way_that_becomes_better_is_found():
    slow, heavy = WORLDS["a slow draft"], WORLDS["weights cost most"]
    num_tokens = 8 * 9 * 3 * 10 * RETRY_INTERVAL  # ten windows of the other way
    best = speed(Always(), heavy)
    assert speed(RoundCoalescer(), slow, after=heavy, num_tokens=num_tokens) > 0.95 * best
    assert speed(Never(), heavy) < 0.85 * best
