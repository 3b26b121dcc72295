import random
from itertools import accumulate

import pytest

from specdec.scheduling.acceptance import Acceptance
from specdec.types import RoundTimings
from target_service.scheduler.draft_budget import MAX_TRIAL_TICKS, Budget

MS = 1_000_000


def steep(rows):
    """Compute-bound beyond eight rows."""
    return 20.0 + max(0, rows - 8) * 4.0


def chain(rate, k):
    return list(accumulate([rate] * k, lambda a, b: a * b))


def timings(rows, sessions, ms):
    return RoundTimings(forward_ns=int(0.9 * ms * MS), verify_ns=int(0.1 * ms * MS), batch_sessions=sessions,
                        batch_rows=rows, batch_context=100 * sessions)  # fmt: skip


@pytest.fixture
def budget():
    """One that has seen steps of many sizes."""
    made, source = Budget(), random.Random(0)
    for _ in range(600):
        rows = source.choice((1, 4, 5, 8, 16, 24, 40, 64))
        made.observe(timings(rows, max(1, rows // 5), steep(rows) * source.lognormvariate(0, 0.03)), pause_ns=10_000)
    return made


def test_nothing_is_cut_before_costs_are_known():
    assert Budget().allot([chain(0.1, 4)] * 8, context=0) == [4] * 8


def test_no_drafts_no_work():
    assert Budget().allot([[], [], []], context=0) == [0, 0, 0]


def test_rows_that_cost_nothing_are_kept(budget):
    assert budget.allot([chain(0.3, 4)], context=100) == [4]
    assert budget.num_cut == 0


def test_tails_are_cut_where_rows_cost_more_than_they_bring(budget):
    counts = budget.allot([chain(0.6, 4)] * 8, context=800)
    assert sum(counts) < 32
    assert budget.num_cut == 32 - sum(counts)


def test_the_least_likely_tails_go_first(budget):
    good, bad = budget.allot([chain(0.97, 4), chain(0.2, 4), [], []], context=800)[:2]
    assert good == 4 > bad


def test_now_and_then_more_is_verified_so_that_costs_stay_known(budget):
    chains = [chain(0.5, 4)] * 8
    totals = [sum(budget.allot(chains, context=800)) for _ in range(3 * MAX_TRIAL_TICKS)]
    usual = min(totals)
    more = [total for total in totals if total > usual]
    assert len(set(more)) >= 3
    assert max(more) == 32
    lost = sum(steep(8 + total) - steep(8 + usual) for total in more) / (len(totals) * steep(8 + usual))
    assert lost < 0.03


def test_a_cost_that_was_wrong_is_unlearned():
    """Cold first steps made many rows look dear: the trials correct that."""
    made = Budget()
    for _ in range(3):
        made.observe(timings(5, 1, 200.0), pause_ns=0)
    for _ in range(3):
        made.observe(timings(1, 1, 10.0), pause_ns=0)
    for _ in range(4000):
        (count,) = made.allot([chain(0.8, 4)], context=100)
        made.observe(timings(count + 1, 1, 10.0 + 0.1 * count), pause_ns=0)
    counts = [made.allot([chain(0.8, 4)], context=100) for _ in range(9)]
    assert counts == [[4]] * 9


def test_a_pause_between_steps_makes_longer_rounds_worth_more():
    """A lone session whose every round waits for the network wants long rounds even where rows cost something."""

    def learned(pause_ms):
        made = Budget()
        for rows in (1, 2, 3, 4, 5) * 20:
            made.observe(timings(rows, 1, 2.0 + 1.0 * rows), pause_ns=int(pause_ms * MS))
        return made.allot([chain(0.55, 4)], context=100)[0]

    assert learned(0.0) < learned(7.0)


def test_more_tokens_per_second_than_without_a_budget():
    """Six sessions of mixed drafts on a steep target: the budget's choice is better than all or nothing."""
    rates = [0.95, 0.9, 0.6, 0.4, 0.2, 0.0]

    def throughput(pick):
        source, made = random.Random(1), Budget()
        sessions = [Acceptance(made.totals) for _ in rates]
        tokens = spent = 0.0
        for step in range(600):
            lengths = pick(made, sessions)
            ms = steep(len(rates) + sum(lengths)) * source.lognormvariate(0, 0.03)
            made.observe(timings(len(rates) + sum(lengths), len(rates), ms), pause_ns=0)
            spent += ms if step > 100 else 0.0
            for session, rate, length in zip(sessions, rates, lengths, strict=True):
                accepted = 0
                while accepted < length and source.random() < rate:
                    accepted += 1
                tokens += 1 + accepted if step > 100 else 0
                if length:
                    session.observe(length, accepted)
                    made.totals.observe(length, accepted)
        return tokens / spent

    def budgeted(made, sessions):
        return made.allot([session.survival(4) for session in sessions], context=600)

    assert throughput(budgeted) > 1.01 * throughput(lambda made, sessions: [0] * 6)
    assert throughput(budgeted) > 1.2 * throughput(lambda made, sessions: [4] * 6)


def test_few_steps_cut_nothing():
    made = Budget()
    for _ in range(10):
        made.observe(timings(40, 8, 500.0), pause_ns=0)
        made.observe(timings(8, 8, 1.0), pause_ns=0)
    assert made.allot([chain(0.01, 4)] * 8, context=800) == [4] * 8
