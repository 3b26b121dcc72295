"""Pacing against simulated targets whose true costs are known: never slower, and a gain where there is one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.pacing.controller import AdaptivePace, FixedPace
from gateway.pacing.target_pacer import TargetPacer
from specdec.types import RoundTimings, Verdict
from tests.gateway.pacing.simulation import Simulation, World, adaptive, fixed, plain

MS = 1_000_000


def small(rows: float, sessions: float) -> float:
    """A small model on a CPU: every row and every session costs something."""
    return 1.6 + 0.10 * rows + 0.12 * sessions


def large(rows: float, sessions: float) -> float:
    """A large model on a CPU: the weights are read once for up to eight rows, then it is compute-bound."""
    return 28.0 + 0.2 * rows + 0.3 * sessions + 1.8 * max(0.0, rows - 8)


def accelerator(rows: float, sessions: float) -> float:
    """Rows cost next to nothing."""
    return 12.0 + 0.02 * rows + 0.05 * sessions


TICKS = {"small": (small, 0.12, True), "large": (large, 0.12, True), "accelerator": (accelerator, 0.5, False)}


def world(kind: str, rate: float, sessions: int, hits: float = 0.0) -> World:
    step, draft, shared = TICKS[kind]
    return World(
        step=step, draft=draft, shared=shared, hits=hits, tokens=64, prompt=16,
        acceptance=lambda *_: rate, load=lambda _: sessions,
    )  # fmt: skip


def throughput(policy, world, warm_up=200, cycles=600):
    """Tokens per second after so many plain cycles of warming up, over so many."""
    simulation = Simulation(world, policy)
    count = world.load(0.0)
    cycle_s = world.step(count, count) / 1000.0
    simulation.run(warm_up * cycle_s)
    return simulation.run(cycles * cycle_s), simulation.lane


@pytest.mark.parametrize("sessions", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("kind", TICKS)
def test_never_slower(kind, rate, sessions):
    of = world(kind, rate, sessions)
    speed, _ = throughput(adaptive, of, cycles=600 if sessions < 64 else 200)
    assert speed >= 0.97 * throughput(plain, of, cycles=600 if sessions < 64 else 200)[0]


def test_a_fixed_length_would_be_slower():
    """The twin that must fail: without pacing a bad draft costs what it costs."""
    of = world("small", 0.0, 8)
    assert throughput(fixed(4), of)[0] < 0.7 * throughput(plain, of)[0]


@pytest.mark.parametrize(
    ("kind", "rate", "sessions", "hits"),
    [("small", 0.8, 1, 0.6), ("small", 0.95, 4, 0.0), ("large", 0.5, 1, 0.0), ("large", 0.95, 8, 0.0),
     ("accelerator", 0.8, 8, 0.6), ("accelerator", 0.8, 32, 0.6)],
)  # fmt: skip
def test_nearly_as_fast_as_the_best_fixed_length(kind, rate, sessions, hits):
    of = world(kind, rate, sessions, hits)
    best = max(throughput(fixed(k), of)[0] for k in (1, 2, 4))
    assert best > 1.1 * throughput(plain, of)[0]
    assert throughput(adaptive, of)[0] > 0.85 * best


def heavy(rows, sessions):
    """A large model whose weights take longer to read than all the rows of eight sessions to compute."""
    return 24.0 + 0.4 * rows + 0.4 * sessions


def test_sessions_that_draft_stay_together():
    """Where a step costs much whatever its size, two groups of sessions that take turns would pay for it twice."""
    of = World(step=heavy, draft=0.12, shared=True, tokens=64, prompt=16, acceptance=lambda *_: 0.8, load=lambda _: 8)
    together = throughput(fixed(4), of)[0]
    assert together > 1.15 * throughput(fixed(4), replace(of, gathers=False))[0]
    assert throughput(adaptive, of)[0] > 0.9 * together


@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8])
def test_where_both_ways_are_about_as_fast_changing_between_them_costs_little(rate):
    """Rows beyond eight cost so much that speculation is hardly ever worth it."""
    of = replace(world("large", rate, 8), noise=0.1)
    speed = throughput(adaptive, of, cycles=1500)[0]
    assert speed >= 0.98 * throughput(plain, of, cycles=1500)[0]


def test_requests_that_come_and_go_do_not_start_the_search_anew():
    """All sessions end every two seconds, as between two bursts of requests."""
    of = replace(world("large", 0.9, 4), load=lambda now_s: 0 if now_s % 2.0 > 1.9 else 4)
    simulation = Simulation(of, adaptive)
    simulation.run(30.0)
    begun = dict(simulation.lane.tally.begun)
    speed = simulation.run(30.0)
    reference = Simulation(of, plain)
    reference.run(30.0)
    assert speed > 1.1 * reference.run(30.0)
    assert sum(simulation.lane.tally.begun.values()) - sum(begun.values()) < 10


def test_nothing_is_drafted_while_nothing_is_accepted_but_for_rare_probes():
    simulation = Simulation(world("large", 0.0, 4), adaptive)
    simulation.run(20.0)
    begun = len(simulation.ks)
    tokens = simulation.run(40.0) * 40.0
    drafted = sum(k for _, k in simulation.ks[begun:])
    assert 0 < drafted < 0.01 * tokens


def test_a_draft_that_gets_better_is_found():
    of = World(
        step=large, acceptance=lambda now_s, _: 0.0 if now_s < 20.0 else 0.9, load=lambda _: 1, tokens=2000, draft=0.12
    )
    simulation = Simulation(of, adaptive)
    simulation.run(20.0)
    before = simulation.run(1.0)
    simulation.run(40.0)
    assert simulation.run(10.0) > 2.0 * before


def test_more_sessions_than_pay_off_turn_speculation_off_and_on_again():
    of = World(
        step=large,
        acceptance=lambda *_: 0.8,
        load=lambda now_s: 32 if 10.0 <= now_s < 30.0 else 1,
        draft=0.12,
        tokens=64,
    )
    simulation = Simulation(of, adaptive)
    simulation.run(10.0)

    def mean_k(seconds):
        begun = len(simulation.ks)
        simulation.run(seconds)
        ks = [k for _, k in simulation.ks[begun:]]
        return sum(ks) / len(ks)

    simulation.run(10.0)
    assert mean_k(5.0) < 0.5
    simulation.run(10.0)
    assert mean_k(5.0) > 2.0


def test_every_session_gets_its_own_length():
    """Half of the sessions are easy, half hopeless, on a target whose rows cost something."""
    of = World(
        step=lambda rows, sessions: 20.0 + 2.0 * rows, acceptance=lambda _, number: 0.95 if number % 2 else 0.05,
        load=lambda _: 4, draft=0.1, tokens=100_000,
    )  # fmt: skip
    simulation = Simulation(of, adaptive)
    simulation.run(10.0)
    drafted: dict[int, list[int]] = {}
    for _ in range(100):
        simulation.run(0.1)
        for client in simulation.clients:
            drafted.setdefault(client.number, []).append(client.k)
    means = {number: sum(ks) / len(ks) for number, ks in drafted.items()}
    assert min(mean for number, mean in means.items() if number % 2) > 2.0
    assert max(mean for number, mean in means.items() if not number % 2) < 0.5


def verdict(num_accepted=0, num_draft_tokens=0, ms=10.0, rows=1, sessions=1):
    timings = RoundTimings(forward_ns=int(ms * MS), batch_sessions=sessions, batch_rows=rows, batch_context=100)
    return Verdict(1, 1, (1,) * (num_accepted + 1), num_accepted, num_draft_tokens, timings=timings)


def test_the_ceiling_and_the_rest_of_the_request_are_obeyed():
    for limit in (0, 1, 3):
        lane = TargetPacer()
        pace, now = AdaptivePace(lane, limit), 0
        for _ in range(50):
            now += 10 * MS
            assert 0 <= pace.num_draft_tokens(1000, now) <= limit
            pace.record(verdict(limit, limit), limit, 0, now)
        assert pace.num_draft_tokens(2, now) <= 1
        assert pace.num_draft_tokens(1, now) == 0
        assert pace.num_multi_step_tokens(3, now) == 3


def test_a_session_leaves_nothing_behind():
    lane = TargetPacer()
    pace = AdaptivePace(lane, 4)
    now = 0
    for _ in range(10):
        now += 10 * MS
        k = pace.num_draft_tokens(1000, now)
        pace.record(verdict(0, k, rows=k + 1), k, 0, now)
    pace.leave()
    pace.leave()
    assert (lane.num_members, lane.num_in_rounds, lane.num_probing, len(lane.sessions)) == (0, 0, 0, 0)


def test_a_session_that_may_not_draft_takes_no_part_in_the_search():
    """What plain decoding takes is learned from it, but it pays for nothing and is compared with nothing."""
    lane = TargetPacer()
    pace, now = AdaptivePace(lane, 0), 0
    for _ in range(50):
        now += 10 * MS
        assert pace.num_draft_tokens(1000, now) == 0
        pace.record(verdict(), 0, 0, now)
    assert lane.forecast.plain_cycle_ns(1) == pytest.approx(10 * MS, rel=0.01)
    assert lane.allowance.savings == 0.0
    assert (lane.num_members, lane.tally.num_plain, lane.contest.turn) == (0, 0, 0)


def test_a_session_that_leaves_in_its_probe_ends_it():
    lane = TargetPacer()
    lane.begin_probe(0)
    first = AdaptivePace(lane, 4)
    first._probe_left = 2
    first.k = 2
    first.leave()
    assert (lane.num_probing, lane.num_members) == (0, 0)


def test_answers_depend_on_what_was_counted_alone():
    """Two sessions with the same counts and times but other tokens get the same lengths, always."""

    def lengths(token_id):
        lane = TargetPacer()
        pace, now, result = AdaptivePace(lane, 4), 0, []
        for step in range(200):
            k = pace.num_draft_tokens(1000, now)
            result.append(k)
            accepted = min(k, step * 7 % 5)
            now += (10 + k) * MS
            told = verdict(accepted, k, ms=10.0 + k, rows=k + 1)
            pace.record(Verdict(1, 1, (token_id,) * (accepted + 1), accepted, k, timings=told.timings), k, 0, now)
        return result

    assert lengths(1) == lengths(2)
    assert len(set(lengths(1))) > 1


def test_a_fixed_pace_asks_for_all_that_is_allowed():
    pace = FixedPace(4)
    assert [pace.num_draft_tokens(remaining, 0) for remaining in (100, 5, 4, 2, 1)] == [4, 4, 3, 1, 0]
    pace.record(verdict(), 4, 0, 0)
    pace.leave()
    assert pace.num_draft_tokens(100, 0) == 4


@pytest.mark.parametrize("sessions", [1, 8])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", TICKS)
def test_trees_are_never_slower_either(kind, rate, sessions):
    """A trial of trees costs more than one of chains, so savings last for longer."""
    of = replace(world(kind, rate, sessions), k=12, depth=4)
    assert throughput(adaptive, of, cycles=1500)[0] >= 0.97 * throughput(plain, of, cycles=1500)[0]


@pytest.mark.parametrize(("kind", "sessions"), [("large", 1), ("accelerator", 8)])
def test_trees_are_drafted_whole_where_they_pay(kind, sessions):
    of = replace(world(kind, 0.85, sessions), k=12, depth=4)
    whole = throughput(fixed(12), of)[0]
    assert whole > 1.2 * throughput(plain, of)[0]
    simulation = Simulation(of, adaptive)
    simulation.run(200 * of.step(sessions, sessions) / 1000.0)
    count = len(simulation.ks)
    assert simulation.run(600 * of.step(sessions, sessions) / 1000.0) > 0.8 * whole
    lengths = [k for _, k in simulation.ks[count:] if k]
    assert lengths.count(12) > 0.95 * len(lengths)


def test_a_session_asks_for_whole_trees_as_soon_as_another_has_met_one():
    lane = TargetPacer()
    first = AdaptivePace(lane, 12)
    timings = RoundTimings(forward_ns=10 * MS, verify_ns=MS, batch_sessions=1, batch_rows=13, batch_context=100)
    for now in range(4):
        first.record(Verdict(1, 1, (1,) * 4, 3, 12, timings=timings), 12, MS, now * 20 * MS, tree_depth=4)
    assert first.survival == [first.survival[0]] * 12
    assert sum(first.survival) == pytest.approx(3, rel=0.2)  # of the four levels three were accepted
    second = AdaptivePace(lane, 12)
    assert len(set(second.survival)) == 1
    first.record(Verdict(1, 1, (1,) * 3, 2, 4, timings=timings), 4, MS, 100 * MS)  # a chain
    assert len(set(first.survival)) > 1
