"""What is drafted ahead: the most likely nodes of all sessions, in short batches, while the device is idle."""

import pytest

from draft_service.ahead.scheduler import BATCH_NS, MAX_ROWS, WINDOW_NS, AheadScheduler, BusyShare, StepTime
from draft_service.draft_request import DraftRequest, InflightBatch


class Clock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class Node:
    def __init__(self, likelihood):
        self.likelihood = likelihood


class Session:
    """A session whose tree holds nodes of these likelihoods."""

    def __init__(self, *likelihoods, budget=10):
        self.undrafted = [Node(likelihood) for likelihood in likelihoods]
        self.budget = budget

    @property
    def tree(self):
        return self

    def draft_for(self, node):
        self.undrafted.remove(node)
        self.budget -= 1
        return DraftRequest(None, 4, lambda _: None, assumed=(1,), likelihood=node.likelihood)


def taken(scheduler):
    return [request.likelihood for request in scheduler.next_batch()]


@pytest.fixture
def share(monkeypatch):
    """Sets the share of the device's time that requests take."""

    def set_to(value):
        monkeypatch.setattr("draft_service.ahead.scheduler.BusyShare.share", lambda share: value)

    set_to(0.0)
    return set_to


def test_the_likeliest_of_all_sessions_come_first(share):
    scheduler = AheadScheduler()
    first, second = Session(0.6, 0.2, 0.1), Session(0.5, 0.4, 0.05)
    for session in (first, second):
        scheduler.add(session)
    scheduler.step_time.max_rows = lambda: 4
    assert taken(scheduler) == [0.6, 0.5, 0.4, 0.2]
    assert taken(scheduler) == [0.1, 0.05]
    assert taken(scheduler) == []
    first.undrafted.append(Node(1.0))
    assert taken(scheduler) == []  # until its next verdict


def test_no_session_gets_more_than_its_budget(share):
    scheduler = AheadScheduler()
    scheduler.add(Session(0.6, 0.5, 0.4, budget=2))
    scheduler.add(Session(0.3, budget=1))
    assert taken(scheduler) == [0.6, 0.5, 0.3]
    assert taken(scheduler) == []


def test_the_busier_the_device_the_likelier_a_node_must_be(share):
    for busy, expected in ((0.0, [0.9, 0.5, 0.3]), (0.4, [0.9, 0.5]), (0.7, [0.9]), (1.0, [])):
        share(busy)
        scheduler = AheadScheduler()
        scheduler.add(Session(0.9, 0.5, 0.3))
        assert taken(scheduler) == expected


def test_the_share_of_busy_time():
    clock = Clock()
    share = BusyShare(clock)
    assert share.share() == 0.0
    for _ in range(2000):  # 1 ms of work, 3 ms of rest
        clock.now_ns += 4_000_000
        share.add(1_000_000)
    assert share.share() == pytest.approx(0.25, abs=0.01)
    clock.now_ns += 3 * WINDOW_NS
    assert share.share() < 0.02
    for _ in range(1000):
        clock.now_ns += 1_000_000
        share.add(1_000_000)
    assert share.share() == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize(("one_ns", "row_ns"), [(100_000, 50_000), (200_000, 100_000), (300_000, 10_000)])
def test_batches_are_as_large_as_the_time_of_a_step_allows(one_ns, row_ns):
    step_time = StepTime()
    assert step_time.max_rows() == MAX_ROWS
    for _ in range(40):
        for rows in (1, 2, 3, 5):
            step_time.add(rows, 4, 4 * (one_ns + (rows - 1) * row_ns))
    step_ns = max(BATCH_NS / 4, 2 * one_ns)
    assert step_time.max_rows() == min(MAX_ROWS, 1 + (step_ns - one_ns + 1) // row_ns)


def test_batches_that_are_always_stopped_become_smaller():
    """Of each only a step is done; what is known of its time is enough."""
    scheduler = AheadScheduler()
    for _ in range(10):
        batch = InflightBatch([DraftRequest(None, 4, lambda _: None, assumed=(1,)) for _ in range(MAX_ROWS)])
        for request in batch.requests:
            request.stop.request_stop()
        scheduler.record(batch, 1, 3_000_000)
    assert scheduler.step_time.max_rows() < MAX_ROWS
    assert scheduler.counts.busy_ns == 30_000_000


def test_requests_count_as_load_and_a_batch_that_failed_as_nothing():
    scheduler = AheadScheduler()
    scheduler.record(InflightBatch([DraftRequest(None, 4, lambda _: None)]), 4, 10 * WINDOW_NS)
    assert scheduler.busy.share() > 0.9
    assert scheduler.counts.busy_ns == 0
    scheduler.record(InflightBatch([DraftRequest(None, 4, lambda _: None, assumed=(1,))]), 0, 5)
    assert scheduler.step_time.max_rows() == MAX_ROWS
    assert scheduler.counts.busy_ns == 5
