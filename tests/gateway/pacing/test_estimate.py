"""What rounds are expected to bring, from steps, cycles and drafts that were seen."""

import pytest

from gateway.pacing.estimate import Forecast
from specdec.types import RoundTimings

MS = 1_000_000


def timings(rows, sessions, ms):
    return RoundTimings(forward_ns=int(ms * MS), batch_sessions=sessions, batch_rows=rows, batch_context=0)


def taught(sessions=2, *, draft_ms=1.0, extra_ms=3.0, k=2):
    """A step takes 10 ms and a row 1 ms, plain cycles 2 ms more; rounds of k tokens wait ``extra_ms`` besides."""
    forecast = Forecast()
    for step in range(200):
        rows = sessions * (1 + step % 5)
        # Two steps of the same length are taken for one that several sessions report.
        assert forecast.observe_step(timings(rows, sessions, 10 + rows + step * 1e-5))
        assert not forecast.observe_step(timings(rows, sessions, 10 + rows + step * 1e-5))
        forecast.observe_draft(k, int(k * draft_ms * MS))
    for _ in range(100 * sessions):
        plain, drafted = 10.0 + sessions, 10.0 + sessions * (1 + k)
        forecast.plain.record(sessions, (plain + 2.0) * MS, timings(sessions, sessions, plain), 0)
        forecast.speculative.record(
            sessions, (drafted + 2.0 + extra_ms) * MS, timings(sessions * (1 + k), sessions, drafted), k
        )
    return forecast


def test_plain_decoding_brings_a_token_of_every_session_a_cycle():
    forecast = taught()
    assert forecast.plain_cycle_ns(2) == pytest.approx(14 * MS, rel=0.02)
    assert forecast.goodput(2, 1.0)(0, 0, 0.0) == pytest.approx(2 / (14 * MS), rel=0.02)


def test_rounds_wait_for_their_rows_their_drafts_and_their_messages():
    """Of the 3 ms a round of two tokens waits, 2 are drafting, so one of four waits 5."""
    goodput = taught().goodput(2, 1.0)
    for k, wait_ms in ((1, 2.0), (2, 3.0), (4, 5.0)):
        cycle_ms = 10 + 2 * (1 + k) + 2.0 + wait_ms
        assert goodput(2 * k, 2, 1.5) == pytest.approx(3.5 / (cycle_ms * MS), rel=0.03)


def test_what_is_hidden_of_the_drafting_is_not_waited_for():
    goodput = taught(extra_ms=0.5).goodput(2, 1.0)
    assert goodput(8, 2, 1.5) == pytest.approx(3.5 / ((10 + 10 + 2.0 + 1.0) * MS), rel=0.03)


def test_hope_leaves_out_all_but_the_targets_work():
    goodput = taught().goodput(2, 1.0, hopeful=True)
    assert goodput(8, 2, 1.5) == pytest.approx(3.5 / ((10 + 10 + 2.0) * MS), rel=0.03)


def test_sessions_without_drafts_wait_for_the_rows_of_the_others():
    """One of two drafts four tokens: both share a step of six rows."""
    goodput = taught().goodput(2, 1.0)
    drafting_ms, other_ms = 10 + 6 + 2.0 + 5.0, 10 + 6 + 2.0
    assert goodput(4, 1, 2.0) == pytest.approx(3.0 / (drafting_ms * MS) + 1.0 / (other_ms * MS), rel=0.03)


def test_a_sample_stands_for_all_sessions():
    forecast = taught(sessions=8)
    assert forecast.goodput(8, 4.0)(4, 2, 3.0) == pytest.approx(forecast.goodput(8, 1.0)(16, 8, 12.0), rel=0.01)
