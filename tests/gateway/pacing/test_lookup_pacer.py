"""Pacing of lookups: learned without a trial, and a round only where it brings more than it costs."""

import random
from dataclasses import replace

import pytest

from gateway.pacing import lookup_pacer
from gateway.pacing.lookup_pacer import MAX_PAUSE, LookupPace, LookupPacer
from gateway.pacing.lookup_times import FIRST_PRICE, RECENT, LookupTimes
from gateway.pacing.match_acceptance import MatchAcceptance
from specdec.lookup.base import Match
from specdec.lookup.prediction import PredictionLookup
from specdec.params import SamplingParams
from specdec.types import RoundTimings, SessionSpec
from tests.gateway.pacing.lookup_simulation import World, speed

MS = 1_000_000
METHODS = ("ngram",)
#: What a round takes beside its rows, in milliseconds.
ROUND_MS = 0.9


def plain_step(sessions, ms, rows=None):
    return RoundTimings(forward_ns=int(ms * MS), batch_sessions=sessions, batch_rows=rows or sessions)


def steps(pacer, sessions, *, row_ms, fixed_ms=1.0, count=200):
    """Plain steps, and some with more rows, whose time is a straight line."""
    source = random.Random(0)
    for _ in range(count):
        rows = sessions + source.choice((0, 0, 0, 8, 16, 64))
        pacer.record(plain_step(sessions, fixed_ms + row_ms * rows, rows))


def show(pace, *, right, length, num_tokens=8):
    """A match is found, and so many of its tokens are what comes next; what the pace would have drafted."""
    num_drafted = pace.num_draft_tokens(Match((5,) * num_tokens, length), 1.0)
    pace.record((*(5,) * right, 6), RoundTimings(), 0)
    return num_drafted


def test_acceptance_is_learned_from_what_was_not_drafted():
    acceptance = MatchAcceptance()
    for _ in range(100):
        acceptance.observe(9, 4, 3)
        acceptance.observe(2, 1, 0)
    first, following = acceptance.rates(12)
    assert first > 0.94
    assert following == pytest.approx(2 / 3, abs=0.05)
    assert acceptance.rates(3)[0] < 0.05
    assert acceptance.rates(40) == pytest.approx(acceptance.rates(12)), "never seen: like shorter ones"


def test_a_text_begins_with_what_is_known_of_others():
    known = MatchAcceptance()
    for _ in range(50):
        MatchAcceptance(known).observe(4, 8, 0)
    assert MatchAcceptance(known).rates(4)[0] < 0.1


def test_a_continuation_that_is_cut_off_by_the_verdict_says_nothing_of_the_rest():
    acceptance = MatchAcceptance()
    for _ in range(100):
        acceptance.observe(4, 1, 1)
    first, following = acceptance.rates(4)
    assert (first > 0.95, following) == (True, MatchAcceptance().rates(4)[1])


@pytest.mark.parametrize("sessions", [1, 8])
def test_matches_that_are_never_right_are_not_drafted_and_found_again_when_they_are(sessions):
    pacer = LookupPacer()
    steps(pacer, sessions, row_ms=0.1)
    pace = LookupPace(pacer, METHODS)
    drafted = [show(pace, right=0, length=3) for _ in range(40)]
    assert not any(drafted[10:])
    assert all([show(pace, right=8, length=3) for _ in range(100)][-10:])


def test_long_matches_are_drafted_and_short_ones_are_not_at_the_same_time():
    pacer = LookupPacer()
    steps(pacer, 8, row_ms=0.1)
    pace = LookupPace(pacer, METHODS)
    for _ in range(30):
        long, short = show(pace, right=8, length=20), show(pace, right=0, length=2)
    assert (long, short) == (8, 0)


def test_rows_cost_what_the_times_of_steps_tell():
    pacer = LookupPacer()
    assert list(pacer.row_prices(16))[8] == 0.0  # of a target that was never seen
    steps(pacer, 8, row_ms=0.1)
    step_ms = 1.0 + 0.1 * 8
    pacer.record(plain_step(8, step_ms))
    prices = list(pacer.row_prices(16))
    assert prices[0] == 0.0
    assert prices[16] == pytest.approx(1.6 * 8 / step_ms, rel=0.25)
    alone = LookupPacer()
    steps(alone, 1, row_ms=0.1)
    assert list(alone.row_prices(16))[16] < prices[16] / 2


def cycles(times, *, sessions, token_ms, round_ms, saved=3.0, count=20_000):
    """Sessions get a token at a time, and every fifth time a round, where lookups are on; it saves so many tokens."""
    for number in range(count):
        is_round = not times.is_off and number % 5 == 0
        num_tokens = 1 + round(saved) * is_round
        times.record(sessions, int((token_ms + round_ms * is_round) * MS), num_tokens, int(is_round), saved * is_round)


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("round_ms", [0.0, 0.4, 9.0])
def test_the_price_is_measured_against_windows_of_plain_tokens(sessions, round_ms):
    times = LookupTimes()
    assert times.price == FIRST_PRICE
    cycles(times, sessions=sessions, token_ms=2.0, round_ms=round_ms)
    assert times.off_ns == pytest.approx(2.0 * MS)
    assert times.price == pytest.approx(round_ms / 2.0, rel=0.1, abs=0.1)


@pytest.mark.parametrize("loses", [False, True])
def test_rounds_are_charged_with_what_sessions_lose_that_look_nothing_up(loses):
    """Each fourth verdict of a session is a round that is always right; two others lose half a token by each."""
    pacer = LookupPacer()
    _, *others = LookupPace(pacer, METHODS), LookupPace(pacer), LookupPace(pacer)
    for number in range(4000):
        is_off = pacer.times.is_off
        is_round = not is_off and number % 4 == 0
        pacer.record_cycle(
            2 * MS, 1 + is_round, int(is_round), float(is_round), num_verdicts=1, looks_up=True, is_drafting=False
        )
        for other in others:
            other.record((1,) if is_off or not loses or number % 8 else (), RoundTimings(), 2 * MS * number)
    assert pacer.times.price == pytest.approx(1.0 if loses else 0.0, abs=0.15)


def test_sessions_that_look_nothing_up_cost_pacing_nothing_while_nobody_does(monkeypatch):
    pacer, cycles = LookupPacer(), []
    monkeypatch.setattr(pacer, "record_cycle", lambda *values, **_: cycles.append(values))
    plain = LookupPace(pacer)

    def decode():
        cycles.clear()
        for number in range(10):
            plain.record((1,), RoundTimings(), 2 * MS * number)
        return len(cycles)

    assert decode() == 0
    looking = LookupPace(pacer, METHODS)
    assert decode() == 9
    looking.leave()
    assert decode() == 0


def windows(times, *, token_ms, drafting, num_windows):
    """Windows of one session, in which no looked-up round is worth its price; how many were without lookups."""
    num_off = 0
    for _ in range(num_windows):
        num_off += times.is_off
        for _ in range(25):
            times.record(1, int(token_ms * MS), 1, 0, 0.0, num_drafting=drafting)
    return num_off


def test_windows_are_compared_with_those_in_which_as_many_sessions_draft():
    """What a draft gains, or takes from plain tokens beside it, is no gain of lookups."""
    times = LookupTimes()
    for token_ms, drafting in ((2.0, False), (1.6, True), (2.2, False)):
        windows(times, token_ms=token_ms, drafting=drafting, num_windows=2 * RECENT)
        assert times.off_ns == int(token_ms * MS), "measured anew within a few windows"
        assert times.price == FIRST_PRICE
    assert windows(times, token_ms=2.2, drafting=False, num_windows=20) == 10, "neither is faster"


@pytest.mark.parametrize("lost_ms", [0.0, 4.0])
def test_a_round_that_takes_the_place_of_a_drafts_round_is_priced_in_plain_tokens(lost_ms):
    """A draft that is twice as fast: a token takes 1 ms, a plain one 2 ms."""
    times = LookupTimes()
    for number in range(4000):
        is_round = not times.is_off and number % 2 == 0
        cycle_ms = 2.0 * (is_round or 0.5) + lost_ms * is_round
        times.record(1, int(cycle_ms * MS), 1 + is_round, 2.0 * is_round, 0.0, num_drafting=1)
    assert times.price == pytest.approx(lost_ms / 2.0, abs=0.2)


def test_a_price_that_is_not_paid_any_more_is_forgotten():
    times = LookupTimes()
    cycles(times, sessions=1, token_ms=2.0, round_ms=20.0)
    assert times.price > 5.0
    for _ in range(10_000):
        times.record(1, 2 * MS, 1, 0, 0.0)
    assert times.price == FIRST_PRICE


def test_what_wrong_predictions_cost_shows_soon_after_right_ones():
    """Windows of right ones have many rounds, which are cheap."""
    times, num_cycles = LookupTimes(), 0

    def decode(number, lost_ms, num_right):
        is_round = not times.is_off and number % (1 if num_right else 3) == 0
        times.record(1, int((2.0 + lost_ms * is_round) * MS), 1 + num_right * is_round, int(is_round), num_right or 1.0)

    for number in range(10_000):
        decode(number, 0.2, 8)
    assert times.price < 0.2
    while times.price < 1.0:
        num_cycles += not times.is_off
        decode(num_cycles, 6.0, 0)
    assert num_cycles < 80, "a window has 13"


def test_windows_of_few_rounds_tell_no_price():
    """Tokenizing and looking up make every token slower, whether or not rounds are drafted."""
    times = LookupTimes()
    for number in range(20_000):
        is_round = not times.is_off and number % 50 == 0
        times.record(1, int((2.0 if times.is_off else 2.4) * MS), 1, int(is_round), 0.0)
        assert times.price == FIRST_PRICE


def test_a_prediction_that_was_right_is_drafted_at_once():
    """Windows with lookups may be too short to learn that from its matches."""
    pacer = LookupPacer()
    steps(pacer, 32, row_ms=0.005)
    pace = LookupPace(pacer, METHODS, is_predicted=True)
    assert pace.num_draft_tokens(Match((5,) * 32, 30), 1.0) > 16
    assert pace.num_draft_tokens(Match((5,) * 4, 0), 1.0) == 0
    drafted = LookupPace(pacer, METHODS).num_draft_tokens(Match((5,) * 32, 30), 1.0)
    assert drafted == 0, "a long match predicts nothing by itself"


def test_windows_without_lookups_lose_a_hundredth_of_what_lookups_gain():
    times, num_off = LookupTimes(), 0
    for number in range(20_000):
        num_off += times.is_off
        is_round = not times.is_off and number % 2 == 0
        times.record(1, 2 * MS, 1 + 8 * is_round, int(is_round), 8.0 * is_round)
    assert 0 < num_off / 20_000 < 0.01


def test_lookups_end_soon_where_texts_become_bad():
    times = LookupTimes()
    cycles(times, sessions=1, token_ms=2.0, round_ms=0.4)
    num_cycles = 0
    while not times.is_off or not num_cycles:
        assert num_cycles < 2 * RECENT * 25, "twice as many windows as are remembered, of 25 tokens"
        times.record(1, int(2.8 * MS), 1, 1, 0.0)
        num_cycles += not times.is_off


def test_one_stall_is_no_price():
    times = LookupTimes()
    cycles(times, sessions=1, token_ms=2.0, round_ms=0.4)
    price = times.price
    times.record(1, 2000 * MS, 1, 1, 3.0)
    cycles(times, sessions=1, token_ms=2.0, round_ms=0.4, count=100)
    assert times.price < price + 10.0


def test_a_text_is_looked_up_after_its_first_verdict():
    """Nobody records that one; a verdict later, right predictions of 96 tokens had 0.8 of their gain."""
    pacer = LookupPacer()
    pacer.times.is_off = False
    assert LookupPace(pacer, METHODS).looks_up()


def test_a_text_in_which_nothing_is_worth_a_round_says_when_it_looks_next():
    pacer = LookupPacer()
    pace, now = LookupPace(pacer, METHODS), 0
    looked, passed = 0, 0
    for _ in range(200):
        num_passes = pace.pause_left
        now += (num_passes + 1) * MS
        pace.record((1,) * (num_passes + 1), plain_step(1, 1.1), now, num_verdicts=num_passes + 1)
        looked += pace.looks_up()
        passed += num_passes
    assert passed > 800
    assert looked > 20
    assert LookupPace(pacer, METHODS, is_fixed=True).pause_left == 0


def test_a_text_without_matches_is_looked_up_rarely():
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=0.1)
    pace, looked = LookupPace(pacer, METHODS), 0
    for number in range(1000):
        pace.record((1,), plain_step(1, 1.1), number * MS)
        looked += pace.looks_up()
    assert 1000 / MAX_PAUSE / 4 < looked < 1000 / MAX_PAUSE + 10


#: Targets, networks and gateways that have nothing in common but the rule.
WORLDS = {
    "many rows are slow": World(step=lambda rows: 0.6 + 0.09 * rows),
    "rows cost nothing, far away": World(step=lambda rows: 8.0 + 0.002 * rows, network=3.0),
    "messages take longer than steps": World(step=lambda rows: 1.0 + 0.01 * rows, network=4.0),
    "a slow gateway": World(step=lambda rows: 0.6 + 0.05 * rows, round=1.5),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("sessions", [1, 8])
def test_lookups_are_never_slower_than_plain_decoding(name, sessions):
    world = replace(WORLDS[name], sessions=sessions)
    for acceptance in (0.1, 0.5):
        assert speed(replace(world, acceptance=acceptance), seconds=4.0 / sessions)[0] >= 0.97
    assert speed(replace(world, copied=0.9), seconds=4.0 / sessions)[0] > 1.2


@pytest.mark.parametrize("before", [0.25, 4.0])
@pytest.mark.parametrize("sessions", [1, 8])
def test_a_machine_that_becomes_faster_or_slower_is_measured_again(before, sessions):
    change = {"slowness": lambda ms: before if ms < 3000.0 else 1.0}
    world = World(step=lambda rows: 0.6 + 0.09 * rows, sessions=sessions, **change)
    assert speed(replace(world, acceptance=0.6), seconds=4.0)[0] >= 0.96
    assert speed(replace(world, copied=0.9), seconds=4.0)[0] > 1.1


def test_a_price_that_is_not_measured_is_slower(monkeypatch):
    """The twin that must fail."""

    class Guess(LookupTimes):
        def record(self, *_, **__):
            self.is_off = False

    world = replace(WORLDS["a slow gateway"], sessions=8, acceptance=0.5)
    monkeypatch.setattr(lookup_pacer, "LookupTimes", Guess)
    assert speed(world, seconds=0.5)[0] < 0.5


def test_one_step_that_was_short_ends_no_lookups():
    """What a round costs is predicted for every length: one step's own time is not compared with it."""
    for ms in (0.4, 4.0):
        pacer = LookupPacer()
        steps(pacer, 1, row_ms=0.1, fixed_ms=4.0)
        pace = LookupPace(pacer, METHODS)
        for _ in range(10):
            show(pace, right=8, length=9)
        pacer.record(plain_step(1, ms))
        assert list(pacer.row_prices(8)) == sorted(pacer.row_prices(8))
        assert pace.num_draft_tokens(Match((5,) * 8, 9), 1.0) == 8


def test_matches_that_were_never_wrong_at_any_length_are_drafted():
    """Their acceptance rate is 1 in floating point; each length begins with what is known of the shorter ones."""
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=0.1)
    for length in (1, 3, 7, 15, 31, 63):
        for _ in range(100):
            pacer.acceptances[METHODS].observe(length, 31, 31)
    assert pacer.acceptances[METHODS].rates(63)[1] == 1.0
    assert LookupPace(pacer, METHODS).num_draft_tokens(Match((5,) * 31, 63), 1.0) == 31


def test_methods_are_measured_apart():
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=0.1)
    for methods, right in ((("ngram",), 0), (("suffix",), 8)):
        for _ in range(40):
            show(LookupPace(pacer, methods), right=right, length=3)
    assert show(LookupPace(pacer, ("ngram",)), right=0, length=3) == 0
    assert show(LookupPace(pacer, ("suffix",)), right=8, length=3) == 8


def test_a_fixed_length_is_what_was_found():
    assert LookupPace(LookupPacer(), METHODS, is_fixed=True).num_draft_tokens(Match((1, 2, 3), 1), 1.0) == 3


def decode(text, prediction, *, row_ms, speedup=1.0, told=None):
    """Tokens that were drafted and rejected, and the time as a multiple of that without a prediction: plain decoding,
    or rounds of a draft with three tokens each that are ``speedup`` times as fast. ``told``: the pace hears another.
    """
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=row_ms)
    pace, lookup = LookupPace(pacer, METHODS, is_predicted=True), PredictionLookup(lambda: prediction)
    state = lookup.open(SessionSpec(session_id="s", token_ids=(1,), prompt_len=1, params=SamplingParams()))
    at, num_rejected, spent_ms, token_ms = 0, 0, 0.0, 1.0 + row_ms
    while at < len(text):
        state.ingest(state.num_pending)
        match = lookup.look_up(state, 32) if pace.looks_up() else Match()
        count = pace.num_draft_tokens(match, told or speedup) if match.token_ids else 0
        pairs = zip(match.token_ids[:count], text[at:], strict=False)
        num_right = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), count)
        committed = tuple(text[at : at + (num_right + 1 if count or speedup == 1.0 else 3)])
        step_ms = 1.0 + row_ms * (1 + count)
        timings = RoundTimings(forward_ns=int(step_ms * MS), batch_sessions=1, batch_rows=1 + count)
        spent_ms += step_ms + ROUND_MS if count else len(committed) * token_ms / speedup
        pace.record(committed, timings, int(spent_ms * MS), is_drafting=speedup != 1.0)
        state.replace(len(state.token_ids), committed)
        at += len(committed)
        num_rejected += count - num_right
    return num_rejected, spent_ms * speedup / (token_ms * len(text))


def wrong_predictions():
    """A text, and predictions that are wrong: another text, and this one with one or two wrong tokens after each."""
    source = random.Random(0)
    text, other, third = ([source.randrange(4000) for _ in range(1000)] for _ in range(3))
    return text, [other, *([token for tokens in zip(*mixed, strict=True) for token in tokens]
                           for mixed in ((text, other), (text, other, third)))]  # fmt: skip


@pytest.mark.parametrize("row_ms", [0.005, 0.1])
@pytest.mark.parametrize("speedup", [1.0, 1.4])
def test_a_wrong_prediction_costs_a_few_rounds(row_ms, speedup):
    text, predictions = wrong_predictions()
    for prediction in predictions:
        num_rejected, slowdown = decode(text, prediction, row_ms=row_ms, speedup=speedup)
        assert num_rejected <= 30
        assert slowdown <= 1.01
    assert decode(text, text, row_ms=row_ms, speedup=speedup)[1] < 0.45


def test_a_prediction_that_is_compared_with_plain_decoding_slows_a_draft_down():
    """The twin that must fail: four of five tokens of a prediction are right, which brings less than a draft does."""
    source = random.Random(0)
    text = [source.randrange(4000) for _ in range(1000)]
    prediction = [token for i in range(0, 1000, 4) for token in (*text[i : i + 4], source.randrange(4000))]
    assert decode(text, prediction, row_ms=0.005, speedup=3.0)[1] <= 1.01
    assert decode(text, prediction, row_ms=0.005, speedup=3.0, told=1.0)[1] > 1.04, "until windows show it"
