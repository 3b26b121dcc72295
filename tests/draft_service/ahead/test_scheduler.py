"""What is drafted ahead: the likeliest hypotheses of all sessions, in short batches, while the device is idle."""

import pytest

from draft_service.ahead.scheduler import BATCH_NS, MAX_ROWS, WINDOW_NS, AheadScheduler, Load, Pace
from draft_service.batcher import DraftRequest, InflightBatch


class Clock:
    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class Hypothesis:
    def __init__(self, likelihood):
        self.likelihood = likelihood


class Session:
    """A session whose tree holds hypotheses of these likelihoods."""

    def __init__(self, *likelihoods, budget=10):
        self.open = [Hypothesis(likelihood) for likelihood in likelihoods]
        self.budget = budget

    @property
    def tree(self):
        return self

    def draft_for(self, hypothesis):
        self.open.remove(hypothesis)
        self.budget -= 1
        return DraftRequest(None, 4, lambda _: None, assumed=(1,), likelihood=hypothesis.likelihood)


def taken(lookahead):
    return [wish.likelihood for wish in lookahead.take()]


@pytest.fixture
def share(monkeypatch):
    """Sets the share of the device's time that wishes take."""

    def set_to(value):
        monkeypatch.setattr("draft_service.ahead.scheduler.Load.share", lambda load: value)

    set_to(0.0)
    return set_to


def test_the_likeliest_of_all_sessions_come_first(share):
    lookahead = AheadScheduler()
    first, second = Session(0.6, 0.2, 0.1), Session(0.5, 0.4, 0.05)
    for session in (first, second):
        lookahead.add(session)
    lookahead._pace.max_rows = lambda: 4
    assert taken(lookahead) == [0.6, 0.5, 0.4, 0.2]
    assert taken(lookahead) == [0.1, 0.05]
    assert taken(lookahead) == []
    assert not lookahead._sessions  # until their next verdicts


def test_no_session_gets_more_than_its_budget(share):
    lookahead = AheadScheduler()
    lookahead.add(Session(0.6, 0.5, 0.4, budget=2))
    lookahead.add(Session(0.3, budget=1))
    assert taken(lookahead) == [0.6, 0.5, 0.3]
    assert taken(lookahead) == []


def test_the_busier_the_device_the_likelier_a_hypothesis_must_be(share):
    for busy, expected in ((0.0, [0.9, 0.5, 0.3]), (0.4, [0.9, 0.5]), (0.7, [0.9]), (1.0, [])):
        share(busy)
        lookahead = AheadScheduler()
        lookahead.add(Session(0.9, 0.5, 0.3))
        assert taken(lookahead) == expected


def test_the_share_of_busy_time():
    clock = Clock()
    load = Load(clock)
    assert load.share() == 0.0
    for _ in range(2000):  # 1 ms of work, 3 ms of rest
        clock.now_ns += 4_000_000
        load.add_busy(1_000_000)
    assert load.share() == pytest.approx(0.25, abs=0.01)
    clock.now_ns += 3 * WINDOW_NS
    assert load.share() < 0.02
    for _ in range(1000):
        clock.now_ns += 1_000_000
        load.add_busy(1_000_000)
    assert load.share() == pytest.approx(1.0, abs=0.001)


@pytest.mark.parametrize(("one_ns", "row_ns"), [(100_000, 50_000), (200_000, 100_000), (300_000, 10_000)])
def test_batches_are_as_large_as_the_time_of_a_step_allows(one_ns, row_ns):
    pace = Pace()
    assert pace.max_rows() == MAX_ROWS
    for _ in range(40):
        for rows in (1, 2, 3, 5):
            pace.count(rows, 4, 4 * (one_ns + (rows - 1) * row_ns))
    step_ns = max(BATCH_NS / 4, 2 * one_ns)
    assert pace.max_rows() == min(MAX_ROWS, 1 + (step_ns - one_ns + 1) // row_ns)


def test_batches_that_are_always_stopped_become_smaller():
    """Of each only a step is done; what is known of its time is enough."""
    lookahead = AheadScheduler()
    for _ in range(10):
        flight = InflightBatch([DraftRequest(None, 4, lambda _: None, assumed=(1,)) for _ in range(MAX_ROWS)])
        for wish in flight.wishes:
            wish.stop.please()
        lookahead.landed(flight, 1, 3_000_000)
    assert lookahead._pace.max_rows() < MAX_ROWS
    assert lookahead.counts.busy_ns == 30_000_000


def test_wishes_count_as_load_and_a_batch_that_failed_as_nothing():
    lookahead = AheadScheduler()
    lookahead.landed(InflightBatch([DraftRequest(None, 4, lambda _: None)]), 4, 10 * WINDOW_NS)
    assert lookahead._load.share() > 0.9
    assert lookahead.counts.busy_ns == 0
    lookahead.landed(InflightBatch([DraftRequest(None, 4, lambda _: None, assumed=(1,))]), 0, 5)
    assert lookahead._pace.max_rows() == MAX_ROWS
    assert lookahead.counts.busy_ns == 5
