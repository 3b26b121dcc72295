"""Pacing of lookups: learned without a trial, and a round only where it brings more than it costs."""

import random

import pytest

from gateway.pacing.lookup_pacer import ROUND_NS, WAIT_NS, LookupPace, LookupPacer
from gateway.pacing.match_acceptance import MatchAcceptance
from specdec.lookup.base import Match
from specdec.lookup.prediction import PredictionLookup
from specdec.params import SamplingParams
from specdec.types import RoundTimings, SessionSpec, Verdict

MS = 1_000_000


def plain_step(sessions, ms, rows=None):
    timings = RoundTimings(forward_ns=int(ms * MS), batch_sessions=sessions, batch_rows=rows or sessions)
    return Verdict(1, 10, (1,), timings=timings)


def steps(pacer, sessions, *, row_ms, fixed_ms=1.0, count=200):
    """Plain steps, and some with more rows, whose time is a straight line."""
    source = random.Random(0)
    for _ in range(count):
        rows = sessions + source.choice((0, 0, 0, 8, 16, 64))
        pacer.record(plain_step(sessions, fixed_ms + row_ms * rows, rows))


def show(pace, *, right, length, num_tokens=8):
    """A match is found, and so many of its tokens are what comes next; what the pace would have drafted."""
    num_drafted, _ = pace.num_draft_tokens(Match((5,) * num_tokens, length), 1.0)
    pace.record(Verdict(1, 10, (*(5,) * right, 6)))
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
    pace = LookupPace(pacer)
    drafted = [show(pace, right=0, length=3) for _ in range(40)]
    assert not any(drafted[10:])
    assert all([show(pace, right=8, length=3) for _ in range(100)][-10:])


def test_long_matches_are_drafted_and_short_ones_are_not_at_the_same_time():
    pacer = LookupPacer()
    steps(pacer, 8, row_ms=0.1)
    pace = LookupPace(pacer)
    for _ in range(30):
        long, short = show(pace, right=8, length=20), show(pace, right=0, length=2)
    assert (long, short) == (8, 0)


def test_the_price_is_that_of_rows_and_messages():
    pacer = LookupPacer()
    assert list(pacer.prices(16))[8] == 0.0  # of a target that was never seen
    steps(pacer, 8, row_ms=0.1)
    step_ms = 1.0 + 0.1 * 8
    pacer.record(plain_step(8, step_ms))
    prices = list(pacer.prices(16))
    assert prices[0] == pytest.approx(0.4 * 8 / step_ms, rel=0.1)
    assert prices[16] - prices[0] == pytest.approx(1.6 * 8 / step_ms, rel=0.25)
    alone = LookupPacer()
    steps(alone, 1, row_ms=0.1)
    assert list(alone.prices(16))[16] < prices[16] / 2


def test_one_step_that_was_short_ends_no_lookups():
    """What a round costs is predicted for every length: one step's own time is not compared with it."""
    for ms in (0.4, 4.0):
        pacer = LookupPacer()
        steps(pacer, 1, row_ms=0.1, fixed_ms=4.0)
        pace = LookupPace(pacer)
        for _ in range(10):
            show(pace, right=8, length=9)
        pacer.record(plain_step(1, ms))
        assert list(pacer.prices(8)) == sorted(pacer.prices(8))
        assert pace.num_draft_tokens(Match((5,) * 8, 9), 1.0)[0] == 8


def test_matches_that_were_never_wrong_at_any_length_are_drafted():
    """Their acceptance rate is 1 in floating point; each length begins with what is known of the shorter ones."""
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=0.1)
    for length in (1, 3, 7, 15, 31, 63):
        for _ in range(100):
            pacer.acceptance().observe(length, 31, 31)
    assert pacer.acceptance().rates(63)[1] == 1.0
    assert LookupPace(pacer).num_draft_tokens(Match((5,) * 31, 63), 1.0)[0] == 31


def test_methods_are_measured_apart():
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=0.1)
    for methods, right in ((("ngram",), 0), (("suffix",), 8)):
        for _ in range(40):
            show(LookupPace(pacer, methods), right=right, length=3)
    assert show(LookupPace(pacer, ("ngram",)), right=0, length=3) == 0
    assert show(LookupPace(pacer, ("suffix",)), right=8, length=3) == 8


@pytest.mark.parametrize("sessions", [1, 8])
def test_the_target_waits_for_the_next_round_of_a_session_alone(sessions):
    pacer = LookupPacer()
    steps(pacer, sessions, row_ms=0.01)
    _, waits = LookupPace(pacer).num_draft_tokens(Match((5,) * 8, 20), 1.0)
    assert waits is (sessions == 1)


def test_a_fixed_length_is_what_was_found():
    assert LookupPace(LookupPacer(), is_fixed=True).num_draft_tokens(Match((1, 2, 3), 1), 1.0) == (3, True)


def decode(text, prediction, *, row_ms, speedup=1.0, told=None):
    """Tokens that were drafted and rejected, and the time as a multiple of that without a prediction: plain decoding,
    or rounds of a draft with three tokens each that are ``speedup`` times as fast. ``told``: the pace hears another.
    """
    pacer = LookupPacer()
    steps(pacer, 1, row_ms=row_ms)
    pace, lookup = LookupPace(pacer, is_predicted=True), PredictionLookup(prediction)
    state = lookup.open(SessionSpec(session_id="s", token_ids=(1,), prompt_len=1, params=SamplingParams()))
    at, num_rejected, spent_ms, token_ms = 0, 0, 0.0, 1.0 + row_ms
    while at < len(text):
        state.ingest(state.num_pending)
        match = lookup.look_up(state, 32)
        count, _ = pace.num_draft_tokens(match, told or speedup)
        pairs = zip(match.token_ids[:count], text[at:], strict=False)
        num_right = next((i for i, (drafted, token) in enumerate(pairs) if drafted != token), count)
        committed = tuple(text[at : at + (num_right + 1 if count or speedup == 1.0 else 3)])
        step_ms = 1.0 + row_ms * (1 + count)
        timings = RoundTimings(forward_ns=int(step_ms * MS), batch_sessions=1, batch_rows=1 + count)
        pace.record(Verdict(1, 10, committed, timings=timings))
        state.replace(len(state.token_ids), committed)
        at += len(committed)
        num_rejected += count - num_right
        spent_ms += step_ms + (ROUND_NS + WAIT_NS) / MS if count else len(committed) * token_ms / speedup
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
    """The twin that must fail: two of three tokens of a prediction are right, which brings less than a draft does."""
    source = random.Random(0)
    text = [source.randrange(4000) for _ in range(1000)]
    prediction = [token for i in range(0, 1000, 2) for token in (*text[i : i + 2], source.randrange(4000))]
    assert decode(text, prediction, row_ms=0.005, speedup=1.4)[1] <= 1.01
    assert decode(text, prediction, row_ms=0.005, speedup=1.4, told=1.0)[1] > 1.2
