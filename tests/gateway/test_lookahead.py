"""Drafting ahead stays on where rounds are faster with it, and off where they are not."""

import random

import pytest

from gateway.lookahead import FEW, FIRST_PAUSE, TURN_ROUNDS, TURNS, Lookahead


class Clock:
    """Rounds of ``num_sessions`` sessions that take what the way they are drafted in takes, give or take noise."""

    def __init__(self, lookahead, *, ahead_ns, serial_ns, noise=0.1, seed=0):
        self.lookahead = lookahead
        self.ahead_ns, self.serial_ns = ahead_ns, serial_ns
        self.noise = random.Random(seed)
        self.spread = noise
        self.turns = {}
        #: Rounds drafted for ahead, and all.
        self.num_ahead = self.num_rounds = 0

    def run(self, num_rounds, num_sessions=1):
        for _ in range(num_rounds):
            for session in range(num_sessions):
                # What was asked for at the last verdict decides how long the round takes.
                turns, was_ahead = self.turns.get(session, ((0, 0), True))
                mean_ns = self.ahead_ns if was_ahead else self.serial_ns
                cycle_ns = int(mean_ns * (1.0 + self.spread * self.noise.uniform(-1.0, 1.0)))
                self.lookahead.record(cycle_ns, num_sessions, turns[0])
                ahead = self.lookahead.num_ahead() > 0
                self.turns[session] = (turns[1], self.lookahead.turn), ahead
                self.num_ahead += ahead
                self.num_rounds += 1

    @property
    def share(self):
        """Share of the rounds that were drafted for ahead since the last look."""
        share = self.num_ahead / self.num_rounds
        self.num_ahead = self.num_rounds = 0
        return share


@pytest.mark.parametrize("num_sessions", [1, 5])
@pytest.mark.parametrize(("ahead_ns", "serial_ns", "wins"), [(900, 1000, True), (1100, 1000, False)])
def test_the_faster_way_stays_on(ahead_ns, serial_ns, wins, num_sessions):
    lookahead = Lookahead(None)
    clock = Clock(lookahead, ahead_ns=ahead_ns * 1000, serial_ns=serial_ns * 1000)
    clock.run(2 * TURNS * (TURN_ROUNDS + 3), num_sessions)
    assert 0.3 < clock.share < 0.7  # the comparison
    clock.run(2000, num_sessions)
    assert clock.share > 0.9 if wins else clock.share < 0.1


def test_a_change_is_noticed():
    lookahead = Lookahead(None)
    clock = Clock(lookahead, ahead_ns=800_000, serial_ns=1_000_000)
    clock.run(1500)
    assert lookahead.num_ahead() == FEW
    clock.ahead_ns = 1_500_000
    clock.run(10_000)
    clock.num_ahead = clock.num_rounds = 0
    clock.run(1000)
    assert clock.share < 0.2


def test_comparisons_get_rarer_while_they_agree():
    lookahead = Lookahead(None)
    clock = Clock(lookahead, ahead_ns=1_300_000, serial_ns=1_000_000)
    clock.run(40 * FIRST_PAUSE)
    assert clock.share < 0.03


def test_each_load_has_a_winner_of_its_own():
    lookahead = Lookahead(None)
    alone = Clock(lookahead, ahead_ns=900_000, serial_ns=1_000_000)
    crowd = Clock(lookahead, ahead_ns=1_100_000, serial_ns=1_000_000)
    for _ in range(40):
        alone.run(20)
        crowd.run(20, num_sessions=16)
    alone.num_ahead = alone.num_rounds = crowd.num_ahead = crowd.num_rounds = 0
    alone.run(20)
    crowd.run(20, num_sessions=16)
    assert alone.share > 0.9
    assert crowd.share < 0.1


def test_misses_count_as_much_as_hits():
    """Most rounds are faster with drafting ahead, but their mean is not."""
    lookahead = Lookahead(None)
    clock = Clock(lookahead, ahead_ns=0, serial_ns=1_000_000)
    outcomes = random.Random(1)
    for _ in range(1500):
        clock.ahead_ns = 850_000 if outcomes.random() < 0.6 else 1_500_000
        clock.run(1)
    assert clock.share < 0.3
    assert lookahead.num_ahead() == 0


def test_hiccups_do_not_decide():
    lookahead = Lookahead(None)
    clock = Clock(lookahead, ahead_ns=950_000, serial_ns=1_000_000, noise=0.01)
    for count in range(200):
        clock.run(11)
        lookahead.record(100_000_000, 1, lookahead.turn)  # while drafting ahead more often than not
        clock.run(count % 3)
    assert lookahead.num_ahead() == FEW


@pytest.mark.parametrize("num_ahead", [0, 3])
def test_a_number_that_is_given_is_kept_to(num_ahead):
    lookahead = Lookahead(num_ahead)
    for ahead_ns in (1, 1_000_000_000):
        clock = Clock(lookahead, ahead_ns=ahead_ns, serial_ns=1_000_000)
        clock.run(500)
        assert clock.share == (num_ahead > 0)
        assert lookahead.num_ahead() == num_ahead
