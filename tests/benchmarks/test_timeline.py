"""Rounds on a timeline, against arithmetic done by hand."""

import random

import pytest

from benchmarks.overlap import policies
from benchmarks.rounds import NUM_GUESSES, GuessOutcome, Statistics
from benchmarks.timeline import Policy, SimulatedCosts, play

K = 4
ALL = GuessOutcome(K, 0)
MISS = GuessOutcome(1, NUM_GUESSES)
COSTS = SimulatedCosts(c=0.05, d=0.4, verify=1.1, slope=0.1)
FRESH = K * COSTS.c + COSTS.d

SERIAL, CHAIN, CHAIN_FORWARD, TREE, TREE_FORWARD = policies(3, 3, 4)


def statistics(*outcomes: GuessOutcome) -> Statistics:
    return Statistics.of([outcomes], K)


def test_serial_rounds_take_what_the_formula_says() -> None:
    text = [ALL, MISS, GuessOutcome(0, 2)]
    played = play([text, text], statistics(*text), COSTS, SERIAL)
    assert (played.num_rounds, played.num_tokens, played.num_hits, played.num_wasted) == (6, 16, 0, 0)
    assert played.steps == pytest.approx(6 * (COSTS.verify + FRESH))
    assert played.speed == pytest.approx(16 / played.steps)


@pytest.mark.parametrize(("policy", "per_round"), [(CHAIN, COSTS.verify + COSTS.d / 2), (CHAIN_FORWARD, COSTS.verify)])
def test_full_acceptance_hides_the_draft_and_forwarding_the_network(policy: Policy, per_round: float) -> None:
    text = [ALL] * 10
    played = play([text], statistics(*text), COSTS, policy)
    # The first round waits for its draft; the first one ahead is begun right after it.
    assert played.steps == pytest.approx(FRESH + COSTS.verify + 9 * per_round)
    assert played.num_hits == 9
    assert played.num_wasted == 0


def test_a_wrong_guess_costs_at_most_the_step_it_is_noticed_in() -> None:
    text = [MISS] * 8
    serial = play([text], statistics(*text), COSTS, SERIAL)
    chain = play([text], statistics(ALL, MISS), COSTS, CHAIN)
    assert serial.steps <= chain.steps <= serial.steps + 8 * COSTS.c + 1e-9
    assert chain.num_hits == 0
    assert chain.num_wasted >= 7


def test_a_guessed_rejection_is_a_hit_of_the_tree_alone() -> None:
    text = [GuessOutcome(1, 0)] * 8
    chain = play([text], statistics(*text, ALL), COSTS, CHAIN_FORWARD)
    tree = play([text], statistics(*text, ALL), COSTS, TREE_FORWARD)
    assert chain.num_hits == 0
    assert tree.num_hits == 7
    assert tree.steps == pytest.approx(FRESH + 8 * COSTS.verify)


def test_long_ways_need_guesses_further_ahead() -> None:
    far = SimulatedCosts(c=0.01, d=2.0, verify=1.0)
    text = [ALL] * 12
    known = statistics(*text)
    near = play([text], known, far, Policy(name="", fan_out=1, depth=1, forward=True))
    ahead = play([text], known, far, Policy(name="", fan_out=1, depth=3, forward=True))
    assert ahead.steps < near.steps
    assert ahead.steps == pytest.approx(K * far.c + far.d + 12 * far.verify, abs=0.1)


def test_without_idle_time_drafting_ahead_brings_nothing_but_a_head_start() -> None:
    slow = SimulatedCosts(c=1.0, d=0.0, verify=0.5)
    text = [ALL] * 6
    serial = play([text], statistics(*text), slow, SERIAL)
    chain = play([text], statistics(*text), slow, CHAIN)
    # The guess of the bonus token takes a step of its own, and half of a step is won while the target verifies.
    assert chain.steps <= serial.steps + 6 * slow.c


def random_text(rng: random.Random, length: int) -> list[GuessOutcome]:
    return [GuessOutcome(rng.randrange(K + 1), rng.randrange(NUM_GUESSES + 1)) for _ in range(length)]


def test_no_policy_is_better_than_no_waiting_or_much_worse_than_serial() -> None:
    rng = random.Random(0)
    texts = [random_text(rng, 20) for _ in range(10)]
    known = Statistics.of(texts, K)
    for d in (0.0, 0.3, 1.0, 2.0):
        for c in (0.01, 0.1, 0.3):
            costs = SimulatedCosts(c=c, d=d, verify=1.0)
            serial = play(texts, known, costs, SERIAL)
            gateway, forwarded = play(texts, known, costs, TREE), play(texts, known, costs, TREE_FORWARD)
            for played in (gateway, forwarded):
                assert played.num_tokens == serial.num_tokens
                assert played.steps >= serial.num_rounds * costs.verify
                # What is in progress when a verdict rules it out ends within one step of a full batch.
                assert played.steps <= serial.steps + serial.num_rounds * c * (1 + 3 * costs.slope) + 1e-9
            assert forwarded.steps <= gateway.steps * 1.02


def test_guesses_narrow_with_the_position_and_come_likeliest_first() -> None:
    outcomes = [GuessOutcome(j, rank) for j in range(K + 1) for rank in range(NUM_GUESSES) for _ in range(9 - rank)]
    guesses = Policy(name="", fan_out=4, rejections=True, depth=1).guesses(statistics(*outcomes))
    shares = [share for share, _ in guesses]
    assert shares == sorted(shares, reverse=True)
    widths = [sum(outcome.accepted == j for _, outcome in guesses) for j in range(K + 1)]
    alpha = statistics(*outcomes).alpha
    assert widths == [*(round(4 * alpha ** (j / 2)) for j in range(K)), 4]
    assert not Policy(name="").guesses(statistics(*outcomes))
