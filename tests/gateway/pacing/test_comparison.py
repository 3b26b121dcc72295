"""The two ways of decoding measured against each other: the faster one leads, and looking at the other costs little."""

import random

import pytest

from gateway.pacing.comparison import MAX_TURN_LENGTH, ModeComparison, Phase
from gateway.pacing.exploration_budget import ALLOWED_LOSS, MAX_SAVINGS, ExplorationBudget
from gateway.pacing.mode_stats import CLEAR_TURN, FIRST_PAUSE

MS = 1_000_000.0
PLAIN_NS = 10.0 * MS


class Decoder:
    """Sessions that decode as the contest wants it: a plain cycle takes 10 ms, a round as long as its tokens say."""

    def __init__(self, speed, *, sessions=4, noise=0.0, seed=0):
        """``speed``: of speculation over plain decoding, by the number of sessions; a round brings two tokens."""
        self.contest, self.allowance = ModeComparison(), ExplorationBudget()
        self.speed = speed if callable(speed) else lambda _: speed
        self.sessions, self.noise, self.random = sessions, noise, random.Random(seed)
        self.spent = {True: 0.0, False: 0.0}
        self.lost = 0.0
        self.num_turns = 0
        self.may_speculate = True
        self.settles = True

    def run(self, cycles):
        """So many plain cycles of every session."""
        until = sum(self.spent.values()) + cycles * PLAIN_NS * self.sessions
        while sum(self.spent.values()) < until:
            self.contest.allow(self.may_speculate)
            self.num_turns += self.contest.consider(self.allowance.savings)
            stretch = self.random.lognormvariate(0.0, self.noise)  # a step is slow for all of its sessions
            for _ in range(self.sessions):
                self.cycle(stretch)

    @property
    def speculation_leads(self):
        """Whether speculation is on between two turns."""
        while self.contest.phase is not Phase.LEADING:
            self.run(1)
        return self.contest.speculates

    def cycle(self, stretch):
        contest, speculates = self.contest, self.contest.speculates
        tokens = 2 if speculates else 1
        cycle_ns = stretch * PLAIN_NS * (tokens / self.speed(self.sessions) if speculates else 1.0)
        contest.follow_load(self.sessions)
        counts = self.settles or contest.phase is Phase.LEADING
        lost = contest.record(self.sessions, tokens, cycle_ns, PLAIN_NS, counts=counts)
        self.allowance.book(cycle_ns / (PLAIN_NS * self.sessions), lost)
        self.lost += max(0.0, cycle_ns - tokens * PLAIN_NS / max(1.0, self.speed(self.sessions)))
        self.spent[speculates] += cycle_ns


@pytest.mark.parametrize("speed", [0.4, 0.9, 0.97, 1.0, 1.08, 1.3, 2.5])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_faster_way_leads_and_little_is_lost(speed, noise):
    decoder = Decoder(speed, noise=noise)
    decoder.run(500)
    decoder.spent, decoder.lost = {True: 0.0, False: 0.0}, 0.0
    decoder.run(8000)
    total = sum(decoder.spent.values())
    if speed > 1.05:
        assert decoder.spent[True] > 0.85 * total
    if speed < 0.95:
        assert decoder.spent[False] > 0.95 * total
    if not noise:
        assert decoder.lost < 1.5 * ALLOWED_LOSS * total
    else:
        best = 1.0 / max(1.0, speed)
        assert sum(decoder.spent[way] * (speed if way else 1.0) for way in (True, False)) * best > 0.97 * total


def test_a_clear_turn_is_short():
    decoder = Decoder(0.4)
    while decoder.contest.phase is not Phase.TURN:
        decoder.run(1)
    decoder.run(2 * CLEAR_TURN)
    assert decoder.contest.phase is Phase.LEADING
    assert not decoder.speculation_leads
    assert decoder.contest.waiting(savings=100.0) > FIRST_PAUSE / 2


def test_a_turn_that_cannot_be_paid_for_is_not_soon():
    decoder = Decoder(0.4)
    decoder.run(500)
    assert decoder.contest.waiting(savings=-5.0) > 500
    assert not decoder.contest.consider(savings=-5.0)


def test_every_load_has_a_leader_of_its_own():
    decoder = Decoder(lambda sessions: 1.5 if sessions < 4 else 0.6, sessions=1)
    decoder.run(500)
    assert decoder.speculation_leads
    decoder.sessions = 32
    decoder.run(500)
    assert not decoder.speculation_leads
    decoder.sessions = 1
    decoder.run(20)
    assert decoder.speculation_leads


def test_a_session_more_or_less_is_no_other_load():
    decoder = Decoder(1.5, sessions=8)
    decoder.run(3000)
    assert decoder.speculation_leads
    decoder.run(1)
    waiting = decoder.contest.waiting(savings=100.0)
    for sessions in (7, 8, 9, 6, 8):
        decoder.sessions = sessions
        decoder.run(2)
    assert decoder.contest.waiting(savings=100.0) == pytest.approx(waiting - 10, abs=5)


def test_nothing_is_drafted_where_speculation_cannot_pay():
    decoder = Decoder(2.0)
    decoder.run(500)
    decoder.may_speculate = False
    decoder.run(100)
    spent = decoder.spent[True]
    decoder.run(2000)
    assert decoder.spent[True] == spent
    assert decoder.num_turns < 10
    decoder.may_speculate = True
    decoder.run(1)
    assert decoder.speculation_leads


def test_a_turn_that_nobody_follows_is_given_up():
    """No draft can be had: the sessions go on decoding plainly."""
    decoder = Decoder(1.0)
    decoder.settles = False
    decoder.run(10 * MAX_TURN_LENGTH)
    assert not decoder.speculation_leads
    assert 1 < decoder.num_turns < 8


def test_a_lead_that_is_lost_is_noticed_soon():
    now = {"speed": 1.6}
    decoder = Decoder(lambda _: now["speed"])
    decoder.run(3000)
    assert decoder.speculation_leads
    now["speed"] = 0.8
    decoder.run(200)
    assert not decoder.speculation_leads


def test_a_clear_lead_is_not_questioned_where_the_text_gets_harder():
    now = {"speed": 3.0}
    decoder = Decoder(lambda _: now["speed"])
    decoder.run(600)
    assert decoder.speculation_leads
    turns, decoder.allowance.savings = decoder.num_turns, MAX_SAVINGS
    now["speed"] = 2.0
    decoder.run(100)
    assert decoder.num_turns == turns
    now["speed"] = 0.8  # that is another matter
    decoder.run(100)
    assert decoder.num_turns > turns
    assert not decoder.speculation_leads
